"""Several ranks: a save in the background is there when all have written, and fails on all."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.saved_runs import contents, plain_checkpointer
from tests.support.tiers import tiered
from titan_moe.checkpoint.audit import audit
from titan_moe.checkpoint.tensors import FolderWriter
from titan_moe.config.job_config import Optimizer
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.ranks import run_on_ranks


def _run(folder, mode="async"):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)  # Its bias has 3 rows: over 4 ranks, one has none.
    model.register_buffer("load", torch.zeros(4))  # Every rank holds it.
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(Optimizer(lr=0.1), model.named_parameters())
    checkpointer = plain_checkpointer(
        folder, model, optimizer, interval=2, async_mode=mode, enable_first_step_checkpoint=True
    )
    return model, checkpointer


def _names(folder):
    """Returns the names of checkpoints, the same on all ranks."""
    dist.barrier()
    names = sorted(path.name for path in (folder / "checkpoint").iterdir())
    dist.barrier()
    return names


def _one_writer_is_slow(folder):
    model, checkpointer = _run(folder)
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
    _, waiting = _run(folder / "waiting", "disabled")
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
    assert audit(tmp_path / "checkpoint/step-2").problems == []


def _fails_on_rank_one(folder, mode):
    model, checkpointer = _run(folder, mode)
    checkpointer.maybe_save(1, {"step": 1})
    checkpointer.finish()
    write = FolderWriter.write_data
    if dist.get_rank() == 1:

        def fill_disk(*args):
            write(*args)
            raise OSError(28, "No space left on device")

        FolderWriter.write_data = fill_disk
    lines = []
    try:
        checkpointer.maybe_save(2, {"step": 2})
        checkpointer.finish()
    except RunError as error:
        lines.append(str(error))
    model.load[0] = dist.get_rank()  # Replicas that differ.
    try:
        checkpointer.maybe_save(4, {"step": 4})
    except RunError as error:
        lines.append(str(error))
    return lines, _names(folder)


@pytest.mark.parametrize("mode", tiered(["async"], slow=["disabled"]))
def test_failing_writer_fails_all_ranks_and_spoils_nothing(tmp_path, mode):
    results = run_on_ranks(_fails_on_rank_one, 2, tmp_path, mode)
    assert results[0] == results[1]
    (line, unlike), names = results[0]
    assert line == (
        f"cannot save checkpoint {tmp_path}/checkpoint/step-2: No space left on device; free some "
        "space, or move files by job.dump_folder, checkpoint.folder, HF_HOME, HF_DATASETS_CACHE or "
        "TMPDIR, and start the same command again"
    )
    assert unlike == "ranks hold different values of what should be replicas: model.load " + (
        "(rank 0 unlike rank 1)"
    )
    assert names == ["step-1"]
