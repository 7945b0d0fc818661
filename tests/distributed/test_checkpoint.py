"""Several ranks: checksums and checkpoints do not know layouts; ranks fail together."""

import itertools
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.tiers import tiered
from titan_moe.checkpoint import folder as folders
from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.checksums import checksums
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
        found.append((layout, dtype, checksums(_all_tensors(model, optimizer))))
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


def _drifted():
    tensors = {"fine": torch.ones(3), "drifted": torch.full((3,), float(dist.get_rank() == 2))}
    try:
        checksums(tensors)
    except RunError as error:
        return str(error)


def test_replicas_that_differ_are_named():
    for line in run_on_ranks(_drifted, 3):
        assert line.endswith("replicas: drifted (rank 2 unlike ranks 0, 1)")


def _damaged(folder):
    _, _, checkpointer = _run(folder, "fsdp", seed=0)
    checkpointer.save(1, _state(1))
    if dist.get_rank() == 1:
        (checkpointer.folder / "step-1/__0_0.distcp").write_bytes(b"")
    try:
        checkpointer.load()
    except RunError as error:
        return str(error)


@pytest.mark.slow
def test_a_damaged_tensor_file_stops_all_ranks(tmp_path):
    for line in run_on_ranks(_damaged, 2, tmp_path):
        assert "step-1 is damaged: " in line and "\n" not in line


def _killed_while_saving(folder, where):
    _, _, checkpointer = _run(folder, "fsdp", seed=0)
    checkpointer.save(1, _state(1))
    if dist.get_rank() == 0:
        setattr(folders, where, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
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
