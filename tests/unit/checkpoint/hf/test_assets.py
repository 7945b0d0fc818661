"""An export's config.json and the files beside it, by the folder or the tokenizer of its model."""

import json
from dataclasses import replace

import pytest
import torch

from tests.support.documents import write_ranks
from tests.support.hf_folders import make_folder, small_model
from tests.support.packing import filled
from tests.support.saved_runs import plain_checkpointer
from titan_moe.checkpoint.hf import assets
from titan_moe.checkpoint.hf.read import import_folder
from titan_moe.checkpoint.hf.write import export_checkpoint
from titan_moe.config.job_config import Training
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.models.hf import differences, model_of
from titan_moe.models.hf_settings import TEMPLATES, WRAPPERS, TextFormat

ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in files.items():
        (folder / f"{name}.json").write_text(json.dumps(table))


def _written(model, folders, target, texts=TextFormat()):  # noqa: B008
    """Write what lies beside the weights of an export."""
    target.mkdir(exist_ok=True)
    origin = assets.origin_of(model, folders)
    assets.write_assets(model, origin, folders, texts, torch.float32, target)


def _settings(folder):
    return json.loads((folder / "config.json").read_text())


_MROPE = {"mrope_section": [1, 1, 1], "mrope_interleaved": True}


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "text_config"])
def test_export_keeps_what_config_json_says_beyond_dimensions(inside, tmp_path):
    model = small_model("qwen3_5_moe")
    make_folder(tmp_path / "in", model, torch.bfloat16, one_file=True)
    settings = _settings(tmp_path / "in") | {"eos_token_id": None}
    rope = {"rope_type": "default", "rope_theta": settings["rope_theta"], **_MROPE}
    extra = {"mamba_ssm_dtype": "float32", "nested": {"a": {"b": [1]}}, "eos_token_id": [5, 6]}
    positions = {"rope_parameters": rope | {"partial_rotary_factor": 0.25}, "pad_token_id": 0}
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    settings |= extra | positions | quantized
    whole = {"model_type": "qwen3_5_moe", "text_config": settings} if inside else settings
    _write(tmp_path / "in", config=whole)
    import_folder(tmp_path / "in", tmp_path / "imported", torch.float32)
    export_checkpoint(tmp_path / "imported", tmp_path / "out", torch.bfloat16)
    assert differences(model.config, model_of(tmp_path / "out").config) == []
    found = _settings(tmp_path / "out")
    found = found.get("text_config", found)
    assert found.items() >= extra.items()
    assert [found[key] for key in ENDS] == [None, [5, 6], 0]
    assert found["rope_parameters"].items() >= _MROPE.items()
    assert found["rope_parameters"]["rope_theta"] == settings["rope_theta"]
    assert found["torch_dtype"] == "bfloat16" and "quantization_config" not in found


_POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
_OTHER = {"num_hidden_layers": 2, "mlp_only_layers": [], "max_window_layers": 2, "eos_token_id": 9}


@pytest.mark.parametrize(
    ("published", "generation", "kept"),
    [
        (_POSITIONS | {"rope_scaling": None}, {}, _POSITIONS),
        ({}, {"eos_token_id": [1, 4]}, {"eos_token_id": [1, 4]}),
        (_OTHER, {}, {"max_window_layers": None, "eos_token_id": None}),
    ],
    ids=["table of positions", "end of texts", "other dimensions"],
)
def test_keys_of_the_published_folder_stay_if_it_is_of_the_model(
    published, generation, kept, tmp_path
):
    model = small_model("qwen3")
    _write(tmp_path / "in", config=model.settings() | published, generation_config=generation)
    _written(model, [tmp_path / "in"], tmp_path / "out")
    found = _settings(tmp_path / "out")
    assert {key: found.get(key) for key in kept} == kept


@pytest.mark.parametrize(
    ("eos", "keys", "end"),
    [
        # Documents end with this token, whose model never writes that which ends a turn.
        ("<|eot_id|>", {}, "<|end_of_text|>"),
        ("<|eot_id|>", {"append_eos": "<|end_header_id|>"}, "<|end_header_id|>"),
        ("<|eot_id|>", {"append_eos": False}, "<|eot_id|>"),
        ("<|end_of_text|>", {}, "<|end_of_text|>"),
    ],
)
def test_an_export_of_a_run_from_scratch_ends_texts_as_its_documents_end(eos, keys, end, tmp_path):
    """The tokenizer is a file of ranks; no JSON file has to name its special tokens."""
    path = write_ranks(tmp_path / "words" / "tokenizer.model")
    names = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": eos}}
    _write(tmp_path / "words", tokenizer_config=names | {"pad_token": "<|end_of_text|>"})
    model = small_model("mixtral")
    checkpointer = plain_checkpointer(tmp_path, filled(model.config), model=model)
    checkpointer.texts = load_tokenizer(path, Training(**keys)).text_format()
    checkpointer.save(1, {})
    export_checkpoint(tmp_path / "checkpoint/step-1", tmp_path / "out", torch.bfloat16)
    found = _settings(tmp_path / "out")
    ids = load_tokenizer(path, Training(append_eos=end))
    text_end = load_tokenizer(path, Training(append_eos="<|end_of_text|>")).eos_id
    assert [found[key] for key in ENDS] == [ids.bos_id, ids.eos_id, text_end]


@pytest.mark.parametrize("kind", ["same", "other", "file", "bytes"])
def test_an_export_carries_the_tokenizer_that_the_model_was_trained_with(kind, tmp_path):
    model = small_model("qwen3")
    settings = model.settings() | {"eos_token_id": [1, 4]}
    words = {"tokenizer": {"a": 1}, "special_tokens_map": {"eos_token": "<eos>"}}
    _write(tmp_path / "in", config=settings, generation_config={"eos_token_id": [1, 4]}, **words)
    trained = words if kind == "same" else words | {"tokenizer": {"b": 1}}
    _write(tmp_path / "words", **trained)
    path = {"file": str(tmp_path / "words/tokenizer.json"), "bytes": "bytes"}
    tokenizer = path.get(kind, str(tmp_path / "words"))
    folders, target = [tmp_path / "in", tmp_path / "words"], tmp_path / "out"
    target.mkdir()
    texts, origin = TextFormat({"eos_token_id": 7}), tmp_path / "in"
    assets.write_assets(model, origin, folders, texts, torch.float32, target, tokenizer)
    found = {path.stem: json.loads(path.read_text()) for path in target.iterdir()}
    assert found.pop("config")["eos_token_id"] == ([1, 4] if kind == "same" else 7)
    assert found == {"same": found, "bytes": {}}.get(kind, trained)
    assert kind != "same" or (found["tokenizer"] == {"a": 1} and "generation_config" in found)


def test_end_of_a_turn_ends_texts_of_a_published_model_around_a_text_model(tmp_path):
    """Inside of text_config and beside it; a run on bytes has no files to change."""
    model = replace(small_model("qwen3"), wrapper=WRAPPERS["llama4"])
    text = model.settings() | {"eos_token_id": [5, 6]}
    _write(tmp_path / "in", config={"model_type": "llama4", "eos_token_id": 5, "text_config": text})
    texts = TextFormat({"eos_token_id": 7}, "{{ messages }}", {"<end>": 9, "<call>": 6})
    _written(model, [tmp_path / "in"], tmp_path / "out", texts)
    found = _settings(tmp_path / "out")
    assert (found["eos_token_id"], found["text_config"]["eos_token_id"]) == ([9, 6, 5], [9, 6, 5])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_an_export_without_a_known_end_of_text_says_so(tmp_path, caplog):
    _written(small_model("qwen3"), [], tmp_path)
    assert any("no eos_token_id is known" in line for line in caplog.messages)


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


def test_templates_beside_the_trained_one_come_along_through_an_import(tmp_path):
    (tmp_path / "in" / TEMPLATES).mkdir(parents=True)
    (tmp_path / "in" / "chat_template.jinja").write_text("a")
    (tmp_path / "in" / TEMPLATES / "tool_use.jinja").write_text("b")
    assets.copy_assets(tmp_path / "in", tmp_path / "kept")
    for trained, kept in (("a", True), ("c", False)):
        texts = TextFormat(template=trained)
        _written(small_model("qwen3"), [tmp_path / "kept"], tmp_path / trained, texts)
        assert (tmp_path / trained / TEMPLATES / "tool_use.jinja").exists() == kept


def test_folders_of_the_checkpoints_before_are_looked_through(tmp_path):
    first, second = ({"initial_load_path": str(tmp_path / name)} for name in ("in", "one"))
    _write(tmp_path / "in", config={})
    _write(tmp_path / "one", manifest={"job": {"checkpoint": first}})
    assert tmp_path / "in" in assets.asset_folders(tmp_path / "two", {"checkpoint": second})
    _write(tmp_path / "one", manifest={"job": {"checkpoint": second}})
    assert assets.asset_folders(tmp_path / "two", {"checkpoint": second}) == []
