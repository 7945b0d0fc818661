"""An export's config.json and the files beside it, by the folder or the tokenizer of its model."""

import json

import pytest
import torch

from tests.support.hf_folders import make_folder, small_model
from titan_moe.checkpoint.hf import assets
from titan_moe.checkpoint.hf.read import import_folder
from titan_moe.checkpoint.hf.write import export_checkpoint
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.models.hf import differences, model_of

ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SPECIAL = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
DECODER = {"added_tokens_decoder": {"7": {"content": "</s>"}, "8": {"content": "<s>"}}}
TOKENIZER = {
    "model": {"vocab": {"a": 0, "<s>": 2}},
    "added_tokens": [{"id": 3, "content": "</s>"}, {"id": 4, "content": "<pad>"}],
}


def _write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in files.items():
        (folder / f"{name}.json").write_text(json.dumps(table))


def _written(model, folders, target, tokenizer=None):
    """Write what lies beside the weights of an export."""
    target.mkdir(exist_ok=True)
    origin = assets.origin_of(model, folders)
    assets.write_assets(model, origin, folders, tokenizer, torch.float32, target)


def _settings(folder):
    return json.loads((folder / "config.json").read_text())


def _exported(folder, changes, text=None):
    """Change config.json of a new folder, import it and export it; returns the export's."""
    model = small_model("qwen3_5_moe")
    make_folder(folder / "in", model, torch.bfloat16, num_files=1)
    settings = _settings(folder / "in") | {"eos_token_id": None} | changes
    if text is not None:
        settings = {"model_type": "qwen3_5_moe", "text_config": settings | text}
    _write(folder / "in", config=settings)
    import_folder(folder / "in", folder / "imported", torch.float32)
    export_checkpoint(folder / "imported", folder / "out", torch.bfloat16)
    assert differences(model.config, model_of(folder / "out").config) == []
    return _settings(folder / "out")


_MROPE = {"mrope_section": [1, 1, 1], "mrope_interleaved": True}


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "text_config"])
def test_export_keeps_what_config_json_says_beyond_dimensions(inside, tmp_path):
    model = small_model("qwen3_5_moe").settings()
    rope = {"rope_type": "default", "rope_theta": model["rope_theta"], **_MROPE}
    extra = {"mamba_ssm_dtype": "float32", "nested": {"a": {"b": [1]}}, "eos_token_id": [5, 6]}
    positions = {"rope_parameters": rope | {"partial_rotary_factor": 0.25}, "pad_token_id": 0}
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    changes = extra | positions | quantized
    found = _exported(tmp_path, {} if inside else changes, changes if inside else None)
    found = found.get("text_config", found)
    assert found.items() >= extra.items()
    assert [found[key] for key in ENDS] == [None, [5, 6], 0]
    assert found["rope_parameters"].items() >= _MROPE.items()
    assert found["rope_parameters"]["rope_theta"] == model["rope_theta"]
    assert found["torch_dtype"] == "bfloat16" and "quantization_config" not in found


def test_ends_of_texts_follow_from_generation_config_json(tmp_path):
    model = small_model("qwen3")
    make_folder(tmp_path / "in", model, torch.bfloat16)
    _write(tmp_path / "in", config=model.settings(), generation_config={"eos_token_id": [1, 4]})
    _written(model, [tmp_path / "in"], tmp_path / "out")
    assert _settings(tmp_path / "out")["eos_token_id"] == [1, 4]


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"tokenizer_config": SPECIAL, "tokenizer": TOKENIZER}, [2, 3, None]),
        ({"tokenizer_config": SPECIAL | DECODER}, [8, 7, None]),
        (
            {
                "tokenizer_config": SPECIAL,
                "special_tokens_map": {"pad_token": "<pad>"},
                "tokenizer": TOKENIZER,
            },
            [2, 3, 4],
        ),
        ({"tokenizer": TOKENIZER}, [None] * 3),
    ],
)
def test_ends_of_texts_follow_from_the_tokenizer_of_a_run_from_scratch(
    files, wanted, tmp_path, caplog
):
    model = small_model("qwen3")
    _write(tmp_path / "words", **files)
    _written(model, [], tmp_path / "out", str(tmp_path / "words"))
    found = _settings(tmp_path / "out")
    assert [found[key] for key in ENDS] == wanted
    assert any("no eos_token_id" in line for line in caplog.messages) == (wanted[1] is None)


def test_a_run_on_bytes_names_its_ends_of_texts(tmp_path):
    _written(small_model("qwen3"), [], tmp_path, "bytes")
    found = _settings(tmp_path)
    own = load_tokenizer("bytes")
    assert [found[key] for key in ENDS] == [own.bos_id, own.eos_id, None]


def test_keys_of_a_model_of_other_dimensions_are_not_taken(tmp_path):
    other = small_model("qwen3", num_layers=2).settings()
    _write(tmp_path / "words", config=other | {"max_window_layers": 2, "eos_token_id": 9})
    _written(small_model("qwen3"), [tmp_path / "words"], tmp_path / "out")
    found = _settings(tmp_path / "out")
    assert "max_window_layers" not in found and found["eos_token_id"] is None


def test_python_files_that_a_folder_names_come_along_or_are_named(tmp_path, caplog):
    names = {"AutoConfig": "configuration_own.Config", "AutoModel": "other/own--modeling_own.Model"}
    (tmp_path / "in").mkdir()
    for name in ("configuration_own.py", "tokenization_own.py", "helpers.py"):
        (tmp_path / "in" / name).write_text("")
    words = {"auto_map": ["tokenization_own.Words", None]}
    model = small_model("qwen3")
    settings = model.settings() | {"auto_map": names, "eos_token_id": 1}
    _write(tmp_path / "in", config=settings, tokenizer_config=words)
    assets.copy_assets(tmp_path / "in", tmp_path / "kept")
    _written(model, [tmp_path / "kept"], tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.py"))) == 3
    assert _settings(tmp_path / "out")["auto_map"] == names and not caplog.messages
    (tmp_path / "kept" / "configuration_own.py").unlink()
    _written(model, [tmp_path / "kept"], tmp_path / "out")
    (line,) = caplog.messages
    assert "auto_map names files that were not there: configuration_own.py" in line
    assert "auto_map" not in _settings(tmp_path / "out")


def test_a_folder_without_named_code_gives_no_python_files(tmp_path):
    _write(tmp_path / "in", tokenizer_config={})
    (tmp_path / "in" / "train.py").write_text("")
    assets.copy_assets(tmp_path / "in", tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["tokenizer_config.json"]


def test_folders_of_the_checkpoints_before_are_looked_through(tmp_path):
    first, second = ({"initial_load_path": str(tmp_path / name)} for name in ("in", "one"))
    _write(tmp_path / "in", config={})
    _write(tmp_path / "one", manifest={"job": {"checkpoint": first}})
    assert tmp_path / "in" in assets.asset_folders(tmp_path / "two", {"checkpoint": second})
    _write(tmp_path / "one", manifest={"job": {"checkpoint": second}})
    assert assets.asset_folders(tmp_path / "two", {"checkpoint": second}) == []
