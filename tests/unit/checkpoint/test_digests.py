"""No byte of a checkpoint changes unseen."""

import random

import pytest
import torch

from tests.support.saved_runs import Run, change_checksum, step_folder
from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.cli.audit import audit
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


def test_manifest_lists_every_other_file(step):
    digests, present = read_manifest(step).files, {path.name for path in step.iterdir()}
    assert digests.keys() == present - {"manifest.json"} and "__0_0.distcp" in digests
    assert audit(step)["damaged"] == []


@pytest.mark.parametrize("name", _READ_WHOLE)
def test_load_and_audit_refuse_every_flipped_bit_of_files_read_whole(step, name):
    for _ in _flips(step / name, 16):
        with pytest.raises(RunError, match="is damaged"):
            _load(step)
        assert audit(step)["damaged"]


def test_flipped_bit_of_a_tensor_file_is_found_or_makes_no_difference(step):
    wanted, found = _load(step), 0
    for _ in _flips(step / "__0_0.distcp", 17):
        try:
            loaded = _load(step)
        except RunError as error:
            named = "is damaged: __0_0.distcp: " in str(error) or "checksum of" in str(error)
            assert audit(step)["damaged"] and named and "weights_only" not in str(error)
            found += 1
            continue
        assert audit(step)["damaged"] == [] and torch.equal(loaded.weight, wanted.weight)
        assert torch.equal(loaded.moment, wanted.moment)
    assert found >= 3


@pytest.mark.parametrize("name", [*_READ_WHOLE, "__0_0.distcp"])
def test_audit_finds_truncated_lengthened_and_missing_files(step, name):
    path = step / name
    original = path.read_bytes()
    for content in (original[: len(original) // 2], original + b"\n\n", None):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        assert audit(step)["damaged"], content
        path.write_bytes(original)
    assert audit(step)["damaged"] == []


def test_audit_names_files_that_are_not_listed(step):
    (step / "7.distcp").write_bytes(b"")
    assert audit(step)["damaged"] == [
        f"{step}: 7.distcp is damaged: manifest.json does not list it"
    ]


def test_audit_compares_tensors_with_their_checksums(step):
    change_checksum(step, "model.linear.bias")
    assert audit(step)["damaged"] == [f"{step}: wrong checksum of model.linear.bias"]


def test_check_command_exits_with_one_on_damage(step, tmp_path, capsys):
    assert main(["check", str(step.parent)]) == main(["check", str(step.parent.parent)]) == 0
    assert capsys.readouterr().out.count(f"whole: {step}: checkpoint of step ") == 2
    (step / "train_state.json").write_text("{}")
    assert main(["check", str(step)]) == 1
    assert "damaged: " in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"no checkpoint or Hugging Face folder"):
        audit(tmp_path)
