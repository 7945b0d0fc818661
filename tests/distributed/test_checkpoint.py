"""Several ranks: checksums and checkpoints do not know layouts; ranks fail together."""

import itertools
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.tiers import tiered
from titan_moe.checkpoint import checkpointer as checkpointer_module
from titan_moe.checkpoint import safe_reader, storage
from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.checksum import checksums
from titan_moe.checkpoint.manifest import gather_specs
from titan_moe.checkpoint.tensors import model_tensors, optimizer_tensors
from titan_moe.config.job_config import Checkpoint, Optimizer
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.ranks import RankError, run_on_ranks

EXPERTS = 6  # Over edp 2 and ep 2: 3 per ep rank, then 2 and 1.


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_EFD = nn.Parameter(torch.randn(EXPERTS, 4, 5))


class _Toy(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.linear = nn.Linear(5, 3)  # 3 rows: over 4 ranks, one shard is empty.
        self.experts = _Experts()
        self.register_buffer("bias_E", torch.randn(EXPERTS))
        self.register_buffer("count", torch.tensor(7))
        self.to(dtype)


def _shard(model, layout):
    """Shard the toy: single, fsdp, hsdp, or ep2 and ep4, where the other ranks are edp."""
    world = dist.get_world_size()
    if layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s")))
    elif layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif layout.startswith("ep"):
        ep = int(layout[2:])
        sparse = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("edp", "ep"))
        experts = model.experts
        sharded = distribute_tensor(experts.w_EFD.data, sparse["ep"], [Shard(0)])
        experts.w_EFD = nn.Parameter(sharded)
        fully_shard(experts, mesh=sparse["edp"])
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def _run(folder, layout, *, seed, dtype="float32"):
    torch.manual_seed(seed)
    model = _Toy(getattr(torch, dtype))
    _shard(model, layout)
    optimizer = build_optimizer(Optimizer(lr=0.1), model.named_parameters())
    checkpointer = Checkpointer(
        Checkpoint(enable=True),
        folder,
        modules=[model],
        optimizer=optimizer,
        num_experts=EXPERTS,
        job_record={},
        merge_data=_merge_rows,
    )
    return model, optimizer, checkpointer


def _merge_rows(states):
    rows = {row: place for state in states for row, place in state["rows"].items()}
    return states[0] | {"rows": rows}


def _step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5 + 0.1
    optimizer.step()


def _whole(tensors):
    """Global values as numpy arrays (they travel between processes without shared memory)."""
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).double().numpy()
        for name, t in tensors.items()
    }


def _all_tensors(model, optimizer):
    return model_tensors([model]) | optimizer_tensors([model], optimizer)


def _state(step):
    return {"step": step, "tokens": 0, "data": {"rows": {}}}


def _train_and_save(folder, layout, dtypes):
    expected = {}
    for dtype in dtypes:
        model, optimizer, checkpointer = _run(folder / dtype, layout, seed=0, dtype=dtype)
        _step(model, optimizer)
        _step(model, optimizer)
        checkpointer.save(1, _state(1))
        expected[dtype] = _whole(_all_tensors(model, optimizer))
    return expected


def _pass_on(folder, layouts, dtypes):
    """Load the latest checkpoint in each layout in turn, and save it again as the next step."""
    found = []
    for layout, dtype in itertools.product(layouts, dtypes):
        model, optimizer, checkpointer = _run(folder / dtype, layout, seed=1, dtype=dtype)
        step = checkpointer.load()["step"]
        checkpointer.save(step + 1, _state(step + 1))
        found.append((layout, dtype, _whole(_all_tensors(model, optimizer))))
    return found


@pytest.mark.slow
def test_resharding_is_exact(tmp_path):
    dtypes = ["float32", "bfloat16"]
    expected = run_on_ranks(_train_and_save, 2, tmp_path, "fsdp", dtypes)[0]
    assert len(expected["float32"]) == 3 + 2 + 3 * 3
    for world, layouts in [
        (1, ["single"]),
        (4, ["ep2", "ep4", "hsdp", "fsdp"]),
        (2, ["ep2"]),
        (1, ["single"]),
        (4, ["ep2"]),
    ]:
        for of_rank in run_on_ranks(_pass_on, world, tmp_path, layouts, dtypes):
            for layout, dtype, found in of_rank:
                for name, value in expected[dtype].items():
                    np.testing.assert_array_equal(found[name], value, f"{layout}@{world} {name}")


def _sums(layouts, dtypes):
    found = []
    for layout, dtype in itertools.product(layouts, dtypes):
        model, optimizer, _ = _run(Path("unused"), layout, seed=0, dtype=dtype)
        tensors = _all_tensors(model, optimizer)
        shapes = {name: spec.shape for name, spec in gather_specs(tensors).items()}
        found.append((layout, dtype, checksums(tensors, shapes)))
    return found


def test_checksums_do_not_know_layouts():
    dtypes = ["float64", "float32", "bfloat16"]
    (one,) = run_on_ranks(_sums, 1, ["single"], dtypes)
    expected = {dtype: sums for _, dtype, sums in one}
    # Distinct but for the optimizer's fresh state, which is zero.
    assert all(len(set(sums.values())) == 6 for sums in expected.values())
    for world, layouts in [(2, ["fsdp", "ep2"]), (4, ["fsdp", "ep2", "ep4", "hsdp", "single"])]:
        for of_rank in run_on_ranks(_sums, world, layouts, dtypes):
            for layout, dtype, found in of_rank:
                assert found == expected[dtype], f"{layout}@{world} {dtype}"


def _odd_placements():
    whole = torch.randn(6, 5, 7, generator=torch.manual_seed(0))
    mesh = init_device_mesh("cpu", (2, 2))
    placements = {
        "columns": [Shard(1), Shard(2)],
        "same dim twice": [Shard(0), Shard(0)],
        "part replica": [Replicate(), Shard(2)],
        "replica": [Replicate(), Replicate()],
    }
    tensors = {name: distribute_tensor(whole, mesh, p) for name, p in placements.items()}
    tensors["plain"] = whole
    # Ranks 0 and 1 hold one, ranks 2 and 3 another copy, each pair on a mesh of its own.
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "pair"))
    tensors["own mesh"] = distribute_tensor(whole, pairs["pair"], [Shard(0)])
    # Held by the ranks of one pipeline stage only.
    if dist.get_rank() < 2:
        tensors["stage 0"] = whole
    return checksums(tensors, dict.fromkeys([*tensors, "stage 0"], whole.shape))


@pytest.mark.slow
def test_checksums_under_any_placement():
    for found in run_on_ranks(_odd_placements, 4):
        assert len(found) == 7 and len(set(found.values())) == 1


def _drifted():
    tensors = {"fine": torch.ones(3), "drifted": torch.full((3,), float(dist.get_rank() == 2))}
    try:
        checksums(tensors, {"fine": (3,), "drifted": (3,)})
    except RunError as error:
        return str(error)


def test_replicas_that_differ_are_named():
    for line in run_on_ranks(_drifted, 3):
        assert line.endswith("replicas: drifted (rank 2 unlike ranks 0, 1)")


def _disk_full_on_rank_one(folder):
    _, _, checkpointer = _run(folder, "fsdp", seed=0)
    checkpointer.save(1, _state(1))
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    try:
        checkpointer.save(2, _state(2))
    except RunError as error:
        line = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    names = sorted(path.name for path in (folder / "checkpoint").iterdir())
    dist.barrier()
    checkpointer.save(3, _state(3))
    return line, names, max(storage.saved_steps(checkpointer.folder), default=None)


def test_a_failing_rank_fails_all_and_spoils_nothing(tmp_path):
    results = run_on_ranks(_disk_full_on_rank_one, 2, tmp_path)
    assert results[0] == results[1]
    line, names, latest = results[0]
    assert f"cannot save checkpoint {tmp_path}/checkpoint/step-2: " in line and "\n" not in line
    assert "File too large" in line
    assert names == ["step-1"]
    assert latest == 3


def _disks_of_their_own(folder):
    _, _, checkpointer = _run(folder, "fsdp", seed=0)
    if dist.get_rank() == 1:
        write = checkpointer_module.write_tensors
        elsewhere = folder / "other node"
        checkpointer_module.write_tensors = lambda tensors, _, doing: write(
            tensors, elsewhere, doing=doing
        )
    try:
        checkpointer.save(1, _state(1))
    except RunError as error:
        return str(error), max(storage.saved_steps(checkpointer.folder), default=None)


@pytest.mark.slow
def test_nodes_without_a_shared_folder_are_noticed(tmp_path):
    for line, latest in run_on_ranks(_disks_of_their_own, 2, tmp_path):
        assert (
            "__1_0.distcp is missing: it was removed, or job.dump_folder is not one folder" in line
        )
        assert latest is None


def _unreadable_on_rank_one(folder):
    _, _, checkpointer = _run(folder, "fsdp", seed=0)
    checkpointer.save(1, _state(1))
    if dist.get_rank() == 1:
        safe_reader.METADATA = ".nothing"
    try:
        checkpointer.load()
    except RunError as error:
        return str(error)


@pytest.mark.slow
def test_a_rank_that_cannot_read_stops_all(tmp_path):
    for line in run_on_ranks(_unreadable_on_rank_one, 2, tmp_path):
        assert line.endswith("step-1 is incomplete: .nothing is missing")


def _killed_while_saving(folder, where):
    _, _, checkpointer = _run(folder, "fsdp", seed=0)
    checkpointer.save(1, _state(1))
    if dist.get_rank() == 0:
        setattr(storage, where, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    checkpointer.save(2, _state(2))


def _resume(folder):
    _, _, checkpointer = _run(folder, "fsdp", seed=1)
    state = checkpointer.load()
    checkpointer.save(3, _state(3))
    return state, sorted(path.name for path in (folder / "checkpoint").iterdir())


@pytest.mark.parametrize("where", tiered(["commit"], slow=["write_json"]))
def test_a_killed_save_is_invisible_and_cleared(tmp_path, where):
    with pytest.raises(RankError):
        run_on_ranks(_killed_while_saving, 2, tmp_path, where)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [
        ".step-2.writing",
        "step-1",
    ]
    for state, names in run_on_ranks(_resume, 2, tmp_path):
        assert state["step"] == 1
        assert names == ["step-1", "step-3"]


def _save_rows(folder):
    _, _, checkpointer = _run(folder, "fsdp", seed=0)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    rows = {str(row): row * 10 for row in (rank, rank + 2)}
    checkpointer.save(1, {"step": 1, "tokens": 0, "data": {"rows": rows, "batch": 4}})
    return torch.rand(1).item()


def _load_rows(folder):
    _, _, checkpointer = _run(folder, "fsdp", seed=9)
    fresh = torch.get_rng_state()
    state = checkpointer.load()
    return state, torch.equal(torch.get_rng_state(), fresh), torch.rand(1).item()


def test_data_position_and_random_state_of_all_ranks(tmp_path):
    drawn = run_on_ranks(_save_rows, 2, tmp_path)
    rows = {str(row): row * 10 for row in range(4)}
    expected = {"step": 1, "tokens": 0, "data": {"rows": rows, "batch": 4}}
    same = run_on_ranks(_load_rows, 2, tmp_path)
    assert [state for state, _, _ in same] == [expected] * 2
    assert [value for _, _, value in same] == drawn
    (state, fresh, _), *_ = run_on_ranks(_load_rows, 1, tmp_path)
    assert state == expected and fresh
