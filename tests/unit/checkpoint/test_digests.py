"""No byte of a checkpoint changes unseen."""

import json
import random

import pytest
import torch

from tests.support.saved_runs import Run, step_folder
from titan_moe.checkpoint.audit import audit
from titan_moe.checkpoint.digests import DIGESTS, write_listing
from titan_moe.cli.main import main
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError

_READ_WHOLE = ["manifest.json", "train_state.json", ".metadata"]


@pytest.fixture
def step(saved):
    return step_folder(saved, 2)


def _load(step):
    run = Run(step.parents[1], seed=1)
    run.checkpointer.load()
    return run


def _flips(path, seed):
    """Writes the file with one bit flipped, 20 times, and its own bytes in the end."""
    original, draw = path.read_bytes(), random.Random(seed)
    for _ in range(20):
        data = bytearray(original)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        yield
    path.write_bytes(original)


def test_digests_list_every_file_as_sha256sum_does(step):
    lines = (step / DIGESTS).read_text().splitlines()
    listed = sorted(line.split("  ")[1] for line in lines)
    present = sorted(path.name for path in step.iterdir() if path.name != DIGESTS)
    assert listed == present and "__0_0.distcp" in listed
    assert audit(step).problems == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("train_state.json", '"0": 20', '"0": 21'), ("manifest.json", '"step": 2', '"step": 1')],
)
def test_load_refuses_a_changed_digit_of_data_cursor_or_step(step, name, old, new):
    text = (step / name).read_text()
    assert text.count(old) == 1
    (step / name).write_text(text.replace(old, new))
    with pytest.raises(RunError, match=rf"{name} is damaged: it is not what SHA256SUMS"):
        _load(step)


@pytest.mark.parametrize("name", _READ_WHOLE)
def test_load_and_audit_refuse_every_flipped_bit_of_files_read_whole(step, name):
    for _ in _flips(step / name, 16):
        with pytest.raises(RunError, match="is damaged"):
            _load(step)
        assert audit(step).problems


def test_flipped_bit_of_a_tensor_file_is_found_or_makes_no_difference(step):
    wanted = _load(step).weight
    for _ in _flips(step / "__0_0.distcp", 17):
        assert audit(step).problems
        try:
            assert torch.equal(_load(step).weight, wanted)
        except RunError:
            continue


@pytest.mark.parametrize("name", [*_READ_WHOLE, DIGESTS, "__0_0.distcp"])
def test_audit_finds_truncated_lengthened_and_missing_files(step, name):
    path = step / name
    original = path.read_bytes()
    for content in (original[: len(original) // 2], original + b"\n\n", None):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        assert audit(step).problems, content
        path.write_bytes(original)
    assert audit(step).problems == []


def test_unlisted_files_and_missing_digests_are_refused(step):
    path = step / DIGESTS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "train_state" not in line))
    with pytest.raises(RunError, match=r"SHA256SUMS does not list it"):
        _load(step)
    path.write_text("".join(line for line in lines if "distcp" not in line))
    line = f"{step}: __0_0.distcp is damaged: SHA256SUMS does not list it"
    assert audit(step).problems == [line]
    path.unlink()
    with pytest.raises(RunError, match=r"incomplete: SHA256SUMS is missing"):
        _load(step)


def test_audit_compares_tensors_with_their_checksums(step):
    path = step / "manifest.json"
    manifest = json.loads(path.read_text())
    sums = manifest["checksums"]
    sums["model.linear.bias"] = sums["model.linear.weight"]
    path.write_text(json.dumps(manifest))
    write_listing(step, {})
    assert audit(step).problems == [f"{step}: wrong checksum of model.linear.bias"]


def test_check_command_exits_with_one_on_damage(step, tmp_path, capsys):
    assert main(["check", str(step.parent)]) == 0
    assert "whole: " in capsys.readouterr().out
    (step / "train_state.json").write_text("{}")
    assert main(["check", str(step)]) == 1
    assert "damaged: " in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"no checkpoint or Hugging Face folder"):
        audit(tmp_path)
