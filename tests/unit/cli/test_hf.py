"""hf import, hf export and generate: bad input is one line, and nothing is written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.commands import run_command
from tests.support.hf_folders import assert_same_bits, make_folder, read_folder, small_model
from titan_moe.checkpoint.hf.write import export_checkpoint
from titan_moe.cli.hf import in_processes
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.process_pool import in_fresh_processes


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "in", small_model("qwen3"), torch.bfloat16, num_files=1)
    return tmp_path / "in"


def _change(folder, change):
    tensors = read_folder(folder)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")


def _settings(folder, **changes):
    settings = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(settings))


def no_folder(folder):
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return ["does not exist"]


def no_config(folder):
    (folder / "config.json").unlink()
    return ["has no config.json"]


def no_weights(folder):
    (folder / "model.safetensors").unlink()
    return ["has no weights"]


def pickles_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return ["no safetensors but pytorch_model.bin", "convert it first"]


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return ["damaged, or no safetensors file"]


def garbage(folder):
    (folder / "model.safetensors").write_bytes(b"\x10" + bytes(7) + b"garbage, garbage")
    return ["damaged, or no safetensors file"]


def index_without_files(folder):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ["model-00001-of-00002.safetensors is missing"]


def file_outside(folder):
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ["index.json is damaged: it names a file in another folder"]


def missing_extra_misshapen(folder):
    def change(tensors):
        del tensors["model.layers.0.self_attn.q_norm.weight"]
        tensors["model.extra"] = torch.ones(2)
        tensors["model.norm.weight"] = torch.ones(5)

    _change(folder, change)
    return ["1 tensor missing: model.layers.0.self_attn.q_norm", "model.extra", "[5] (wanted [32])"]


def unknown_model_type(folder):
    _settings(folder, model_type="gpt2")
    return ["model_type='gpt2' is not supported: only"]


def unknown_quantisation(folder):
    _settings(folder, quantization_config={"quant_method": "awq"})
    return ["quant_method='awq' cannot be de-quantised"]


def target_exists(folder):
    (folder.parent / "out").mkdir()
    (folder.parent / "out" / "mine").write_text("kept")
    return ["out exists: name another folder, or remove it"]


CASES = [
    no_folder,
    no_config,
    no_weights,
    pickles_only,
    truncated,
    garbage,
    index_without_files,
    file_outside,
    missing_extra_misshapen,
    unknown_model_type,
    unknown_quantisation,
    target_exists,
]


@pytest.mark.parametrize("case", CASES)
def test_bad_folders_are_one_line_and_leave_nothing(case, folder):
    words = case(folder)
    kept = sorted(path.name for path in folder.parent.iterdir())
    done = run_command("hf", "import", folder, "--out", folder.parent / "out")
    assert done.returncode in (1, 2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words), line
    assert sorted(path.name for path in folder.parent.iterdir()) == kept
    if case is target_exists:
        assert (folder.parent / "out" / "mine").read_text() == "kept"


@pytest.mark.slow
def test_there_and_back_and_a_text(folder, tmp_path):
    done = run_command("hf", "import", folder, "--out", tmp_path / "imported")
    assert done.returncode == 0 and "GB/s" in done.stdout.splitlines()[-1], done.stderr
    done = run_command("hf", "export", tmp_path / "imported", "--out", tmp_path / "out")
    assert done.returncode == 0 and "GB/s" in done.stdout.splitlines()[-1], done.stderr
    assert_same_bits(read_folder(tmp_path / "out"), read_folder(folder))
    done = run_command("hf", "export", tmp_path / "imported", "--out", tmp_path / "out")
    assert done.returncode == 1 and "out exists" in done.stderr
    done = run_command("hf", "export", folder, "--out", tmp_path / "other")
    assert done.returncode == 1 and "no checkpoint of titan_moe" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    texts = []
    for source in (folder, tmp_path / "imported"):
        options = ["--prompt", "hello", "--tokenizer", "bytes", "--max-new-tokens", 8]
        done = run_command("generate", source, *options, "--temperature", 1, "--seed", 3)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1] and texts[0].startswith("hello") and len(texts[0]) > 8
    done = run_command("generate", folder, "--prompt", "hello")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "holds no tokenizer.json" in line


def threads_after_a_failed_export(out):
    with pytest.raises(RunError, match="step-1 does not exist"):
        in_processes(lambda: export_checkpoint(out / "step-1", out / "hf", None))
    return [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_a_failed_export_leaves_no_thread_of_a_process_group(tmp_path):
    """A thread that still holds a tensor while Python ends aborts the process."""
    ((_, names),) = in_fresh_processes(threads_after_a_failed_export, [(tmp_path,)], num_workers=1)
    assert names and not [name for name in names if "gloo" in name]
