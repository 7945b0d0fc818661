"""Checkpoints of several ranks: all ranks fail together, and each gets its own state back."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.saved_runs import plain_checkpointer
from titan_moe.checkpoint.checksums import checksums
from titan_moe.config.job_config import Optimizer
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.ranks import run_on_ranks


def _run(folder, *, seed):
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = build_optimizer(Optimizer(lr=0.1), model.named_parameters())
    return plain_checkpointer(folder, model, optimizer, merge_data=_merge_rows)


def _merge_rows(states):
    rows = {row: place for state in states for row, place in state["rows"].items()}
    return states[0] | {"rows": rows}


def _state(step):
    return {"step": step, "tokens": 0, "data": {"rows": {}}}


def _drifted():
    tensors = {"fine": torch.ones(3), "drifted": torch.full((3,), float(dist.get_rank() == 2))}
    try:
        checksums(tensors)
    except RunError as error:
        return str(error)


def test_replicas_that_differ_are_named():
    for line in run_on_ranks(_drifted, 3):
        assert line.endswith("replicas: drifted (rank 2 unlike ranks 0-1)")


def _damaged(folder):
    checkpointer = _run(folder, seed=0)
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


def _save_rows(folder):
    checkpointer = _run(folder, seed=0)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    rows = {str(row): row * 10 for row in (rank, rank + 2)}
    checkpointer.save(1, {"step": 1, "tokens": 0, "data": {"rows": rows, "batch": 4}})
    return torch.rand(1).item()


def _load_rows(folder):
    checkpointer = _run(folder, seed=9)
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
