"""No byte of a checkpoint changes unseen."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from titan_moe.checkpoint.audit import audit
from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.digests import DIGESTS, write_listing
from titan_moe.cli.main import main
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Checkpoint
from titan_moe.debug.routing_trace import Dims, RecordWriter, Tokens, name_rows, start_record
from titan_moe.runtime.errors import RunError

_READ_WHOLE = ["manifest.json", "train_state.json", ".metadata"]


def _run(folder):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    checkpointer = Checkpointer(
        Checkpoint(enable=True),
        folder,
        modules=[model],
        optimizer=optimizer,
        num_experts=0,
        job_record={"training": {"steps": 3}},
        merge_data=lambda states: states[0],
    )
    return model, checkpointer


@pytest.fixture
def saved(tmp_path):
    _, checkpointer = _run(tmp_path)
    checkpointer.save(7, {"step": 7, "tokens": 0, "data": {"cursor": 1234}})
    return tmp_path / "checkpoint" / "step-7"


def _flip(path, at, bit):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_sha256sum_reads_it(saved):
    lines = (saved / DIGESTS).read_text().splitlines()
    listed = sorted(line.split("  ")[1] for line in lines)
    present = sorted(path.name for path in saved.iterdir() if path.name != DIGESTS)
    assert listed == present and "__0_0.distcp" in listed
    assert audit(saved).problems == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("train_state.json", "1234", "1235"), ("manifest.json", '"step": 7', '"step": 6')],
)
def test_a_changed_digit_is_refused(saved, name, old, new):
    """Of the data's cursor, and of the step."""
    text = (saved / name).read_text()
    assert text.count(old) == 1
    (saved / name).write_text(text.replace(old, new))
    with pytest.raises(RunError, match=rf"{name} is damaged: it is not what SHA256SUMS"):
        _run(saved.parents[1])[1].load()


@pytest.mark.parametrize("name", _READ_WHOLE)
def test_no_flipped_bit_of_what_is_read_whole_is_loaded(saved, name):
    path, draw = saved / name, random.Random(16)
    original = path.read_bytes()
    for _ in range(25):
        _flip(path, draw.randrange(len(original)), draw.randrange(8))
        with pytest.raises(RunError, match="is damaged"):
            _run(saved.parents[1])[1].load()
        assert audit(saved).problems
        path.write_bytes(original)


def test_a_flipped_bit_of_a_tensor_file_is_found_or_makes_no_difference(saved):
    path, draw = saved / "__0_0.distcp", random.Random(17)
    original = path.read_bytes()
    wanted, checkpointer = _run(saved.parents[1])
    checkpointer.load()
    for _ in range(25):
        _flip(path, draw.randrange(len(original)), draw.randrange(8))
        assert audit(saved).problems
        model, checkpointer = _run(saved.parents[1])
        try:
            checkpointer.load()
        except RunError:
            continue
        finally:
            path.write_bytes(original)
        assert torch.equal(model.weight, wanted.weight)


def test_a_flipped_bit_of_the_digests_is_found(saved):
    path, draw = saved / DIGESTS, random.Random(18)
    original = path.read_bytes()
    for _ in range(25):
        _flip(path, draw.randrange(len(original)), draw.randrange(8))
        assert audit(saved).problems
        path.write_bytes(original)


@pytest.mark.parametrize("name", [*_READ_WHOLE, DIGESTS, "__0_0.distcp"])
def test_truncated_lengthened_or_missing(saved, name):
    path = saved / name
    original = path.read_bytes()
    for content in (original[: len(original) // 2], original + b"\n\n", None):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        assert audit(saved).problems, content
        path.write_bytes(original)
    assert audit(saved).problems == []


def test_a_line_that_was_lost(saved):
    path = saved / DIGESTS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "train_state" not in line))
    with pytest.raises(RunError, match=r"SHA256SUMS does not list it"):
        _run(saved.parents[1])[1].load()
    path.write_text("".join(line for line in lines if "distcp" not in line))
    line = f"{saved}: __0_0.distcp is damaged: SHA256SUMS does not list it"
    assert audit(saved).problems == [line]


def test_checkpoints_of_earlier_versions_have_no_digests(saved):
    (saved / DIGESTS).unlink()
    with pytest.raises(RunError, match=r"incomplete: SHA256SUMS is missing"):
        _run(saved.parents[1])[1].load()
    manifest = saved / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"digests": "{DIGESTS}"', '"digests": ""'))
    assert _run(saved.parents[1])[1].load()["step"] == 7
    assert audit(saved).whole == [f"{saved}: checkpoint of step 7, no {DIGESTS}, 8 tensors"]


def test_a_tensor_that_the_manifest_does_not_name(saved):
    path = saved / "manifest.json"
    manifest = json.loads(path.read_text())
    for part in ("tensors", "checksums"):
        del manifest[part]["model.bias"]
    path.write_text(json.dumps(manifest))
    write_listing(saved, {})
    assert audit(saved).problems == [f"{saved}: its manifest does not name model.bias"]


def test_a_tensor_that_is_not_what_was_saved(saved):
    """Though every file is what its digest says."""
    path = saved / "manifest.json"
    manifest = json.loads(path.read_text())
    sums = manifest["checksums"]
    sums["model.bias"] = sums["model.weight"]
    path.write_text(json.dumps(manifest))
    write_listing(saved, {})
    assert audit(saved).problems == [f"{saved}: wrong checksum of model.bias"]


def test_the_command(saved, capsys):
    assert main(["check", str(saved.parent)]) == 0
    assert "whole: " in capsys.readouterr().out
    _flip(saved / "train_state.json", 5, 1)
    assert main(["check", str(saved)]) == 1
    assert "damaged: " in capsys.readouterr().out
    assert main(["check", str(saved.parents[1])]) == 2


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no checkpoint, Hugging Face folder or routing record"):
        audit(tmp_path)


def test_a_routing_record_without_a_whole_step_is_not_whole(tmp_path, capsys):
    start_record(tmp_path, Dims(["layers.0"], 4, 1), after=0)
    assert audit(tmp_path).problems == [f"{tmp_path}: it holds no whole step"]
    tokens = Tokens(name_rows([11]), np.array([0, 1]))
    for rank in range(2):
        writer = RecordWriter(tmp_path, rank=rank, world_size=2, limit_gb=1)
        writer.write(1, tokens, {"layers.0": np.zeros((1, 2, 1), np.uint16)})
        assert main(["check", str(tmp_path)]) == 1 - rank
    assert "routing record, 1 steps" in capsys.readouterr().out
