"""Folders into checkpoints and out again, in small chunks; quantised ones; transformers agrees."""

import json
import os
import shutil

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.support.hf_folders import ALONE, assert_same_bits, make_folder, read_folder, small_model
from tests.support.packing import filled
from tests.support.refusals import failure
from tests.support.saved_runs import plain_checkpointer, saved_model
from titan_moe.checkpoint.digests import read_sums
from titan_moe.checkpoint.hf import read, read_back, write
from titan_moe.checkpoint.hf.folder import HFFolder
from titan_moe.checkpoint.hf.pieces import whole
from titan_moe.checkpoint.hf.read import import_folder, load_alone, load_hf
from titan_moe.checkpoint.hf.write import export_checkpoint
from titan_moe.checkpoint.manifest import TensorSpec, read_manifest
from titan_moe.checkpoint.tensors import StoredTensors
from titan_moe.cli.audit import audit
from titan_moe.models.decoder import Decoder
from titan_moe.runtime.errors import RunError

CPU = torch.device("cpu")


def _imported(folder, model):
    make_folder(folder / "in", model, torch.bfloat16)
    import_folder(folder / "in", folder / "imported", torch.float32)


@pytest.fixture
def small_pieces(monkeypatch):
    """Everything is cut often, and there are several files."""
    monkeypatch.setattr(read, "LARGEST_CHUNK", 700)
    monkeypatch.setattr(write, "LARGEST_FILE", 100_000)
    monkeypatch.setattr(read_back, "LARGEST_BOX", 3000)


@pytest.mark.parametrize("family", [*ALONE, "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_there_and_back_and_transformers_opens_an_export(family, dtype, tmp_path, small_pieces):
    model = small_model(family)
    wanted = make_folder(tmp_path / "in", model, dtype)
    import_folder(tmp_path / "in", tmp_path / "step-0", torch.float32)
    shutil.rmtree(tmp_path / "in")
    export_checkpoint(tmp_path / "step-0", tmp_path / "out", dtype)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_same_bits(read_folder(tmp_path / "out"), wanted)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 1
    assert (tmp_path / "out" / "generation_config.json").exists()
    assert not list(tmp_path.glob(".*"))
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    beyond = f"layers.{model.config.num_layers}."
    assert all(beyond in name for name in info["unexpected_keys"])
    assert opened.dtype == dtype
    assert opened.config.eos_token_id == 1 and opened.config.bos_token_id is None


def test_a_checkpoint_of_an_import_is_loaded_by_training(tmp_path):
    model = small_model("deepseek_v3")
    _imported(tmp_path, model)
    plain = Decoder(model.config)
    imported = str(tmp_path / "imported")
    checkpointer = plain_checkpointer(
        tmp_path / "run", plain, model=model, initial_load_path=imported
    )
    assert checkpointer.load() is None
    direct = load_alone(tmp_path / "in", dtype=torch.float32, device=CPU).model
    found, wanted = plain.state_dict(), direct.state_dict()
    assert_same_bits({name: found[name] for name in wanted}, wanted)
    # A checkpoint of a training can be exported, by the dimensions in its manifest.
    checkpointer.save(3, {})
    export_checkpoint(tmp_path / "run" / "checkpoint" / "step-3", tmp_path / "out", torch.bfloat16)
    assert_same_bits(read_folder(tmp_path / "out"), read_folder(tmp_path / "in"))


@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_last_save_is_exported_beside_its_checkpoint(mode, tmp_path):
    model = small_model("mixtral")
    plain = filled(model.config)
    keys = {"interval": 1, "async_mode": mode, "last_save_in_hf": True, "export_dtype": "float32"}
    checkpointer = plain_checkpointer(tmp_path, plain, model=model, **keys)
    folder = tmp_path / "checkpoint"
    checkpointer.maybe_save(1, {"step": 1})
    with torch.no_grad():
        plain.norm.weight.add_(1)
    checkpointer.maybe_save(2, {"step": 2}, last=True)
    assert {path.name for path in folder.iterdir()} == {"step-1", "step-2", "step-2-hf"}
    for step in (1, 2):
        export_checkpoint(folder / f"step-{step}", tmp_path / str(step), torch.float32)
    first, last, own = map(read_sums, (tmp_path / "1", tmp_path / "2", folder / "step-2-hf"))
    assert own == last != first and own


def test_a_finished_run_makes_the_export_that_it_lacks(tmp_path):
    model = small_model("mixtral")
    checkpointer = plain_checkpointer(
        tmp_path, filled(model.config), model=model, last_save_in_hf=True
    )
    checkpointer.check_export(3)
    checkpointer.save(3, {}, last=True)  # Killed before the export.
    checkpointer.check_export(3, finished=True)
    assert read_sums(tmp_path / "checkpoint" / "step-3-hf")
    checkpointer.check_export(3, finished=True)
    assert "step-3-hf exists" in failure(checkpointer.check_export, 3)


def test_a_checkpoint_that_is_removed_meanwhile_is_one_line(tmp_path, monkeypatch):
    model = small_model("mixtral")
    folder = saved_model(tmp_path, filled(model.config), model=model)
    unhindered = StoredTensors.read

    def removed(self, *box):
        shutil.rmtree(folder, ignore_errors=True)
        return unhindered(self, *box)

    monkeypatch.setattr(StoredTensors, "read", removed)
    line = failure(export_checkpoint, folder, tmp_path / "out", torch.float32)
    assert "is incomplete: __0_0.distcp is missing" in line
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        _imported(tmp_path, small_model("qwen3", num_layers=1))
        export_checkpoint(tmp_path / "imported", tmp_path / "out", torch.bfloat16)
    finally:
        os.umask(before)
    written = [*(tmp_path / "imported").rglob("*"), *(tmp_path / "out").rglob("*")]
    modes = {path.name: path.stat().st_mode & 0o777 for path in written if path.is_file()}
    assert {"manifest.json", "tokenizer_config.json"} <= modes.keys()
    assert any(name.endswith(".safetensors") for name in modes)
    assert set(modes.values()) == {0o640}, modes


def test_a_changed_export_is_refused(tmp_path):
    _imported(tmp_path, small_model("qwen3"))
    out = tmp_path / "out"
    export_checkpoint(tmp_path / "imported", out, torch.bfloat16)
    assert audit(out)["damaged"] == audit(tmp_path / "imported")["damaged"] == []
    file = min(out.glob("*.safetensors"))
    raw = file.read_bytes()
    file.write_bytes(raw[:-3] + bytes([raw[-3] ^ 16]) + raw[-2:])
    assert f"{file.name} is damaged" in audit(out)["damaged"][0]
    line = f"{file.name} is damaged: it is not what SHA256SUMS"
    assert line in failure(import_folder, out, tmp_path / "again", torch.float32)
    assert not (tmp_path / "again").exists()
    assert line in failure(load_hf, out, small_model("qwen3"), {})
    (out / "SHA256SUMS").write_text("")
    assert "SHA256SUMS does not list it" in audit(out)["damaged"][0]
    (out / "SHA256SUMS").unlink()
    import_folder(out, tmp_path / "again", torch.float32)


def _as_fp8(path, names, block=16):
    """Quantise 2-dim tensors of a folder's single file."""
    tensors = read_folder(path)
    for name in names:
        rows, columns = (-(-size // block) for size in tensors[name].shape)
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = torch.rand(rows, columns) + 0.5
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    quantized = {"quant_method": "fp8", "weight_block_size": [block, block]}
    settings = json.loads((path / "config.json").read_text())
    settings |= {"quantization_config": quantized, "torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(settings))


def test_float8_comes_as_what_it_means(tmp_path):
    wanted = make_folder(tmp_path / "in", small_model("deepseek_v3"), torch.float32, one_file=True)
    names = [n for n, t in wanted.items() if t.ndim == 2 and "proj" in n and "eh_proj" not in n]
    _as_fp8(tmp_path / "in", names)
    folder = HFFolder(tmp_path / "in")
    meant = {name: folder.read(name, whole(folder.shapes[name])) for name in names}
    import_folder(tmp_path / "in", tmp_path / "imported", torch.float32)
    export_checkpoint(tmp_path / "imported", tmp_path / "out", torch.float32)
    assert_same_bits(read_folder(tmp_path / "out"), wanted | meant)


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    _imported(tmp_path, small_model("qwen3"))
    (file,) = (tmp_path / "imported").glob("*.distcp")
    content = bytearray(file.read_bytes())
    at = content.index(read_folder(tmp_path / "in")["model.norm.weight"].float().numpy().tobytes())
    content[at + 2] ^= 1
    file.write_bytes(content)
    sources = tmp_path / "imported", tmp_path / "out"
    assert "damaged" in failure(export_checkpoint, *sources, torch.bfloat16)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_a_stored_weight_that_the_model_does_not_have_is_refused(tmp_path, monkeypatch):
    _imported(tmp_path, small_model("qwen3"))
    manifest = read_manifest(tmp_path / "imported")
    manifest.tensors["model.layers.0.attention.wg.weight"] = TensorSpec((4,), "float32")
    monkeypatch.setattr(read, "read_manifest", lambda path: manifest)
    with pytest.raises(RunError, match=r"holds layers\.0\.attention\.wg\.weight, which this model"):
        load_alone(tmp_path / "imported", dtype=torch.float32, device=CPU)


def test_a_bias_that_would_be_lost_is_refused(tmp_path):
    make_folder(tmp_path / "in", small_model("qwen3"), torch.bfloat16)
    loaded = load_alone(tmp_path / "in", dtype=torch.float32, device=CPU)
    loaded.model.layers["1"].moe.router.expert_bias[3] = 0.25
    checkpointer = plain_checkpointer(tmp_path, loaded.model, model=small_model("qwen3"))
    checkpointer.save(1, {})
    step, out = tmp_path / "checkpoint/step-1", tmp_path / "out"
    line = failure(export_checkpoint, step, out, torch.bfloat16)
    assert "layers.1.moe.router.expert_bias" in line and "no place" in line
    assert "no place" in failure(checkpointer.export, 1)
    assert not list(tmp_path.rglob("*writing")) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("inf"), 1e5])
def test_weights_that_are_not_finite_are_not_exported(value, tmp_path):
    model = small_model("mixtral", num_layers=1)
    plain = filled(model.config)
    plain.norm.weight.data[1] = value
    step = saved_model(tmp_path, plain, model=model)
    line = failure(export_checkpoint, step, tmp_path / "out", torch.float16)
    assert "model.norm.weight has values that are NaN or infinite in float16: export a" in line
    assert not (tmp_path / "out").exists()
