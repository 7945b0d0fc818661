"""Groups of worlds from 8 to 4096 ranks, in a fake world."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from titan_moe.config.job_config import Comm
from titan_moe.distributed.agreement import control_group
from titan_moe.distributed.mesh import Meshes, build_mesh
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.distributed.process_groups import ProcessGroups
from titan_moe.simulate.fake_rank import fake_world

LAYOUTS = [
    {"dp_replicate": 1, "ep": 8},
    {"dp_replicate": 2, "ep": 4},
    {"dp_replicate": 2, "tp": 2, "ep": 2, "etp": 2},
    {"pp": 2, "cp": 2, "tp": 2, "ep": 4, "etp": 1},
]


def new_groups(world_size: int, degrees: dict[str, int], rank: int) -> int:
    """Returns the number of groups that a rank of a fake world makes."""
    with (
        fake_world(rank, world_size),
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group,
    ):
        meshes = build_mesh(ParallelDims(world_size, **degrees), "cpu")
        assert new_group.call_count == len(meshes.groups.all())
    return new_group.call_count


@pytest.mark.parametrize("world_size", [8, 64, 4096])
@pytest.mark.parametrize("degrees", LAYOUTS)
def test_one_group_per_list_of_ranks_and_class_of_traffic(world_size: int, degrees: dict[str, int]):
    dims, rank = ParallelDims(world_size, **degrees), world_size - 3
    tokens = {dims.group_of(rank, axis) for axis in ("pp", "tp", "ep", "etp")}
    parameters = {dims.group_of(rank, axis) for axis in ("dp_replicate", "fsdp", "edp")}
    parameters -= {tuple(range(world_size))}  # The world's own group serves these.
    alone = {(rank,)} & (tokens | parameters)
    expected = len(tokens - alone) + len(parameters - alone) + len(alone)
    assert new_groups(world_size, degrees, rank) == expected


def test_on_gpus_only_control_groups_have_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {
        "get_backend_config": lambda group=None: "cuda:nccl,cpu:gloo",
        "get_world_size": lambda: 4,
        "new_group": (new_group := mock.Mock()),
        "ProcessGroupNCCL": mock.Mock(Options=lambda: mock.Mock(config=SimpleNamespace())),
    }
    for name, value in values.items():
        monkeypatch.setattr(dist, name, value, raising=False)
    monkeypatch.setattr(type(dist.group), "WORLD", mock.Mock())
    dims = ParallelDims(4, dp_replicate=2, ep=2)
    meshes = Meshes(dims, 0, mock.Mock(), ProcessGroups(), Comm(parameter_sms=16))
    for axis in ("fsdp", "ep"):
        meshes.group(axis)
    control_group()
    *own, control = new_group.call_args_list
    assert control.args[2] == "gloo" and {call.kwargs["backend"] for call in own} == {"nccl"}
    fsdp, ep = (call.kwargs["pg_options"] for call in own)
    assert fsdp._timeout == own[0].kwargs["timeout"]  # Else torch warns.
    assert (vars(fsdp.config), fsdp.is_high_priority_stream) == ({"max_ctas": 16}, False)
    assert (vars(ep.config), ep.is_high_priority_stream) == ({}, True)
