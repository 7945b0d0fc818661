"""hf import, hf export and generate: bad input is one line, and nothing is written."""

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.support.commands import run_command
from tests.support.hf_folders import assert_same_bits, make_folder, read_folder, small_model
from tests.support.refusals import failure
from titan_moe.checkpoint.hf.write import export_checkpoint
from titan_moe.cli import hf
from titan_moe.cli.hf import COMMANDS, converted
from titan_moe.models.mixtral import hf as mixtral
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.verify.parity.check import logits_difference


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "in", small_model("qwen3"), torch.bfloat16, one_file=True)
    return tmp_path / "in"


def garbage(folder):
    (folder / "model.safetensors").write_bytes(b"\x10" + bytes(7) + b"garbage, garbage")


def index(file):
    table = json.dumps({"weight_map": {"model.norm.weight": file}})
    return lambda folder: (folder / "model.safetensors.index.json").write_text(table)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: folder.rename(folder.parent / "other"), "does not exist"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "no safetensors but pytorch_model.bin.*convert it first",
        ),
        (garbage, "damaged, or no safetensors file"),
        (index("model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors is missing"),
        (index("../other.safetensors"), "index.json is damaged: it names a file in another folder"),
        (lambda f: (f.parent / "out").mkdir(), "out exists: name another folder, or remove it"),
    ],
)
def test_bad_folder_is_one_line_and_leaves_nothing(change, words, folder):
    change(folder)
    kept = sorted(path.name for path in folder.parent.iterdir())
    done = run_command("hf", "import", folder, "--out", folder.parent / "out")
    assert done.returncode in (1, 2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and re.search(words, line), line
    assert sorted(path.name for path in folder.parent.iterdir()) == kept


@pytest.mark.slow
def test_import_and_export_keep_weights_and_generated_text(folder, tmp_path):
    done = run_command("hf", "import", folder, "--out", tmp_path / "imported")
    assert done.returncode == 0 and "MB/s" in done.stdout.splitlines()[-1], done.stderr
    options = ["--out", tmp_path / "out", "--logits"]
    done = run_command("hf", "export", tmp_path / "imported", *options)
    assert done.returncode == 0 and "MB/s" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1].endswith("from those of transformers (bound 0.0001)")
    assert_same_bits(read_folder(tmp_path / "out"), read_folder(folder))
    done = run_command("hf", "export", tmp_path / "imported", "--out", tmp_path / "out")
    assert done.returncode == 1 and "out exists" in done.stderr
    done = run_command("hf", "export", folder, "--out", tmp_path / "other")
    assert done.returncode == 1 and "no checkpoint of titan_moe" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = run_command("hf", "merge", tmp_path / "imported", "--out", tmp_path / "other")
    assert done.returncode == 1 and "imported holds no adapters: titan-moe hf exp" in done.stderr
    texts = []
    for source in (folder, tmp_path / "imported"):
        options = ["--prompt", "hello", "--tokenizer", "bytes", "--max-new-tokens", 8]
        done = run_command("generate", source, *options, "--temperature", 1, "--seed", 3)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1] and texts[0].startswith("hello") and len(texts[0]) > 8
    done = run_command("generate", folder, "--prompt", "hello")
    *_, line = done.stderr.splitlines()  # After lines of progress.
    assert done.returncode == 2 and "holds no tokenizer.json" in line


def _export(monkeypatch, folder):
    """Run `hf export --logits` of an import of a Mixtral, in this process."""
    make_folder(folder / "in", small_model("mixtral"), torch.bfloat16)
    monkeypatch.chdir(folder)
    assert COMMANDS["import"].main("hf import", ["in", "--out", "imported"]) == 0
    return COMMANDS["export"].main("hf export", ["imported", "--out", "out", "--logits"])


def test_a_wrong_table_of_names_shows_in_the_logits(tmp_path, monkeypatch, capsys):
    """Reading back cannot see it, as it goes by the same table."""
    right = mixtral.keys

    def swapped(config):
        keys = dict(right(config))
        one, other = (f"layers.{{layer}}.moe.experts.{name}" for name in ("w1", "w3"))
        return keys | {one: keys[other], other: keys[one]}

    # The folder that is imported is of the same table, so the model is the one that it means.
    monkeypatch.setattr(mixtral, "keys", swapped)
    assert _export(monkeypatch, tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("logits: at most ")


def test_a_model_that_transformers_does_not_know_is_one_line(tmp_path):
    make_folder(tmp_path / "in", small_model("deepseek_v3", 1), torch.bfloat16)
    config = tmp_path / "in/config.json"
    config.write_text(config.read_text().replace('"deepseek_v3"', '"kimi_k2"'))
    line = failure(logits_difference, tmp_path / "in")
    assert "in is written, but transformers cannot open it: The checkpoint you are trying" in line


def test_without_transformers_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hf, "find_spec", lambda name: None)
    assert _export(monkeypatch, tmp_path) == 2
    assert "--logits compares with transformers: pip install" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def threads_after_a_failed_export(out):
    source = out / "step-1"
    with pytest.raises(RunError, match="step-1 does not exist"):
        converted(export_checkpoint, Namespace(source=source, out=out / "hf", dtype="float32"))
    return [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_a_failed_export_leaves_no_thread_of_a_process_group(tmp_path):
    """A thread that still holds a tensor while Python ends aborts the process."""
    ((_, names),) = in_fresh_processes(threads_after_a_failed_export, [(tmp_path,)], num_workers=1)
    assert names and not [name for name in names if "gloo" in name]
