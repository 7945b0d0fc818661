"""Checkpoints of several ranks: all ranks fail together, and each gets its own state back. A save
in the background is there when all have written."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.saved_runs import contents, plain_checkpointer
from tests.support.tiers import tiered
from titan_moe.checkpoint.checksums import checksums
from titan_moe.checkpoint.tensors import FolderWriter
from titan_moe.cli.audit import audit
from titan_moe.config.job_config import Optimizer
from titan_moe.models.registry import model_config
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.ranks import run_on_ranks

MODEL = model_config("deepseek_v3", "gate")


def _run(folder, *, seed=0, replicas=1, **keys):
    """Returns a sharded model, each shard of which has so many copies, and its checkpointer."""
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)  # Its bias has 3 rows: over 4 ranks, one has none.
    model.register_buffer("load", torch.zeros(4))  # Every rank holds it.
    sizes = (replicas, dist.get_world_size() // replicas)
    fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("r", "s")))
    optimizer = build_optimizer(Optimizer(lr=0.1), model.named_parameters(), MODEL)
    return model, plain_checkpointer(folder, model, optimizer, merge_data=_merge_rows, **keys)


def _merge_rows(states):
    rows = {row: place for state in states for row, place in state["rows"].items()}
    return states[0] | {"rows": rows}


def _error_of(call, *args):
    with pytest.raises(RunError) as error:
        call(*args)
    return str(error.value)


def _drifted():
    tensors = {"fine": torch.ones(3), "drifted": torch.full((3,), float(dist.get_rank() == 2))}
    return _error_of(checksums, tensors)


def test_replicas_that_differ_are_named():
    for line in run_on_ranks(_drifted, 3):
        assert line.endswith("replicas: drifted (rank 2 unlike ranks 0-1)")


def _damaged(folder, kept_bytes):
    _, checkpointer = _run(folder)
    checkpointer.save(1, {"step": 1, "tokens": 0, "data": {"rows": {}}})
    if dist.get_rank() == 1:
        path = checkpointer.folder / "step-1/__0_0.distcp"
        path.write_bytes(bytes(path.stat().st_size if kept_bytes else 0))
    dist.barrier()
    return _error_of(checkpointer.load)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept_bytes", "words"), [(False, "damaged or incomplete: __0_0"), (True, "damaged: __0_0")]
)
def test_a_damaged_tensor_file_stops_all_ranks(tmp_path, kept_bytes, words):
    for line in run_on_ranks(_damaged, 2, tmp_path, kept_bytes):
        assert f"step-1 is {words}" in line and "\n" not in line


def _save_rows(folder):
    _, checkpointer = _run(folder)
    rank = dist.get_rank()
    rows = {str(row): row * 10 for row in (rank, rank + 2)}
    checkpointer.save(1, {"step": 1, "tokens": 0, "data": {"rows": rows, "batch": 4}})


def _load_rows(folder):
    _, checkpointer = _run(folder, seed=9)
    return checkpointer.load()


@pytest.mark.parametrize("ranks", [1, 2])
def test_load_restores_data_position_of_all_ranks(tmp_path, ranks):
    run_on_ranks(_save_rows, 2, tmp_path)
    rows = {str(row): row * 10 for row in range(4)}
    expected = {"step": 1, "tokens": 0, "data": {"rows": rows, "batch": 4}}
    assert run_on_ranks(_load_rows, ranks, tmp_path) == [expected] * ranks


# --- saves in the background ---


def _run_in_background(folder, mode="async"):
    options = {"interval": 2, "async_mode": mode, "enable_first_step_checkpoint": True}
    return _run(folder, replicas=2, **options)


def _names(folder):
    """Returns the names of checkpoints, the same on all ranks."""
    dist.barrier()
    names = sorted(path.name for path in (folder / "checkpoint").iterdir())
    dist.barrier()
    return names


def _one_writer_is_slow(folder):
    model, checkpointer = _run_in_background(folder)
    checkpointer.maybe_save(1, {"step": 1})
    checkpointer.finish()
    write = FolderWriter.write_data
    if dist.get_rank() == dist.get_world_size() - 1:
        FolderWriter.write_data = lambda *args: time.sleep(2) or write(*args)
    checkpointer.maybe_save(2, {"step": 2})
    with torch.no_grad():
        model.weight.add_(1)  # Training goes on.
    for _ in range(20):
        checkpointer.maybe_save(3, {})
    seen = [_names(folder)]
    checkpointer.finish()
    seen.append(_names(folder))
    FolderWriter.write_data = write
    with torch.no_grad():
        model.weight.sub_(1)
    _, waiting = _run_in_background(folder / "waiting", "disabled")
    waiting.maybe_save(2, {"step": 2})
    files = [contents(path / "checkpoint/step-2") for path in (folder, folder / "waiting")]
    return seen, files, checkpointer.last_step


def test_slowest_writer_completes_the_files_of_a_save_that_waits(tmp_path):
    for seen, (ours, theirs), last_step in run_on_ranks(_one_writer_is_slow, 4, tmp_path):
        assert seen[0] == [".step-2.writing", "step-1"]
        assert seen[1] == ["step-1", "step-2"] and last_step == 2
        assert ours == theirs
    # A tensor that several ranks hold is written once, and not by one rank alone.
    assert len([name for name in ours if name.endswith(".distcp")]) > 1
    assert audit(tmp_path / "checkpoint/step-2")["damaged"] == []


def _fails_on_rank_one(folder, mode):
    model, checkpointer = _run_in_background(folder, mode)
    checkpointer.maybe_save(1, {"step": 1})
    checkpointer.finish()
    write = FolderWriter.write_data
    if dist.get_rank() == 1:

        def fill_disk(*args):
            write(*args)
            raise OSError(28, "No space left on device")

        FolderWriter.write_data = fill_disk

    def save():
        checkpointer.maybe_save(2, {"step": 2})
        checkpointer.finish()

    full = _error_of(save)
    model.load[0] = dist.get_rank()  # Replicas that differ.
    unlike = _error_of(checkpointer.maybe_save, 4, {"step": 4})
    return full, unlike, _names(folder)


@pytest.mark.parametrize("mode", tiered(["async"], slow=["disabled"]))
def test_failing_writer_fails_all_ranks_and_spoils_nothing(tmp_path, mode):
    results = run_on_ranks(_fails_on_rank_one, 2, tmp_path, mode)
    assert results[0] == results[1]
    line, unlike, names = results[0]
    assert line == (
        f"cannot save checkpoint {tmp_path}/checkpoint/step-2: No space left on device; free some "
        "space, or move files by job.dump_folder, checkpoint.folder, HF_HOME, HF_DATASETS_CACHE or "
        "TMPDIR, and start the same command again"
    )
    assert unlike == "ranks hold different values of what should be replicas: model.load " + (
        "(rank 0 unlike rank 1)"
    )
    assert names == ["step-1"]
