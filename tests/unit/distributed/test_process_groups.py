"""Groups of worlds from 8 to 4096 ranks, in a fake world."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import device_mesh

from tests.support.tiny import tiny
from titan_moe.config.job_config import Comm
from titan_moe.config.parse import load_job
from titan_moe.distributed.agreement import control_group
from titan_moe.distributed.parallel_dims import (
    DENSE_AXES,
    DERIVED_AXES,
    SPARSE_AXES,
    Meshes,
    ParallelDims,
)
from titan_moe.distributed.process_groups import ProcessGroups
from titan_moe.optim.optimizers import make_joined_groups
from titan_moe.parallelize.parallelize import lay_out
from titan_moe.parallelize.policies import make_plan
from titan_moe.simulate.fake_rank import fake_world

LAYOUTS = [
    {"dp_replicate": 1, "ep": 8},
    {"dp_replicate": 2, "ep": 4},
    {"dp_replicate": 2, "tp": 2, "ep": 2, "etp": 2},
    {"pp": 2, "cp": 2, "tp": 2, "ep": 4, "etp": 1},
]


@contextmanager
def watched_world(rank: int, world_size: int, caller: Any = dist) -> Iterator[mock.Mock]:
    """A fake world, and the calls for new groups of a module of torch."""
    with (
        fake_world(rank, world_size),
        mock.patch.object(caller, "new_group", wraps=dist.new_group) as new_group,
    ):
        yield new_group


def new_groups(world_size: int, degrees: dict[str, int], rank: int) -> int:
    """Returns the number of groups that a rank of a fake world makes."""
    with watched_world(rank, world_size) as new_group:
        meshes = ParallelDims(world_size, **degrees).build_mesh("cpu")
        assert new_group.call_count == len(meshes.groups.all()) - 1
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


def test_torch_makes_twenty_times_as_many() -> None:
    """The docstring of Meshes names both numbers."""
    degrees = {"pp": 2, "tp": 2, "ep": 4}
    assert new_groups(16, degrees, 0) == 6
    dims = ParallelDims(16, **degrees)
    with watched_world(0, 16, device_mesh) as new_group:
        root = device_mesh.init_device_mesh("cpu", (16,), mesh_dim_names=("world",))
        dense, _ = (
            root._unflatten(0, tuple(map(dims.size, view)), view)
            for view in (DENSE_AXES, SPARSE_AXES)
        )
        for name, axes in DERIVED_AXES.items():
            dense[axes]._flatten(name)
    assert new_group.call_count == 124


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """torch.distributed in the eyes of a rank 0 of 4 that has NCCL; groups are made and forgotten.

    NCCL itself is not there: nothing here has been seen on it.
    """
    made = mock.Mock()
    values: dict[str, Any] = {
        "get_backend_config": lambda group=None: "cuda:nccl,cpu:gloo",
        "get_world_size": lambda: 4,
        "get_rank": lambda: 0,
        "new_group": made.new_group,
        "ProcessGroupNCCL": mock.Mock(Options=lambda: mock.Mock(config=SimpleNamespace())),
    }
    for name, value in values.items():
        monkeypatch.setattr(dist, name, value, raising=False)
    monkeypatch.setattr(type(dist.group), "WORLD", mock.Mock())
    return made


def meshes_of(comm: Comm, **degrees: int) -> Meshes:
    return Meshes(ParallelDims(4, **degrees), 0, mock.Mock(), ProcessGroups(comm))


def options_of(call: Any) -> tuple[dict[str, int], bool]:
    """NCCL's settings for a group, and whether its stream goes first."""
    options = call.kwargs["pg_options"]
    assert options._timeout == call.kwargs["timeout"]  # Else torch warns.
    return vars(options.config), options.is_high_priority_stream


def test_on_gpus_only_control_groups_have_gloo(nccl: mock.Mock) -> None:
    meshes = meshes_of(Comm(parameter_sms=16), dp_replicate=2, ep=2)
    for axis in ("fsdp", "ep"):
        meshes.group(axis)
    control_group()
    *own, control = nccl.new_group.call_args_list
    assert control.args[2] == "gloo" and {call.kwargs["backend"] for call in own} == {"nccl"}
    assert list(map(options_of, own)) == [({"max_ctas": 16}, False), ({}, True)]


def test_options_of_an_axis_give_it_a_group_of_its_own(nccl: mock.Mock) -> None:
    """The axes tp and ep are the same ranks, fsdp is those of edp."""
    axes = {"ep": {"max_ctas": 8, "high_priority": False}, "fsdp": {"min_ctas": 2, "max_ctas": 4}}
    meshes = meshes_of(Comm.model_validate({"parameter_sms": 16, "axes": axes}), tp=2, ep=2)
    for axis in ("fsdp", "tp", "edp", "ep", "tp", "ep"):
        meshes.group(axis)
    made = {call.kwargs["group_desc"]: options_of(call) for call in nccl.new_group.call_args_list}
    assert made == {
        "fsdp": ({"min_ctas": 2, "max_ctas": 4}, False),
        "tp+sequence": ({}, True),
        "dp_shard+edp+batch+loss": ({"max_ctas": 16}, False),
        "ep": ({"max_ctas": 8}, False),
    }


def test_gradients_have_their_own_groups_with_the_options_of_their_axis(nccl: mock.Mock) -> None:
    axes = {"edp": {"max_ctas": 8, "high_priority": True}}
    comm = Comm.model_validate({"separate_reduce_scatter": True, "axes": axes})
    meshes = meshes_of(comm, ep=2)
    for axis in ("fsdp", "edp", "edp"):
        meshes.gradient_group(axis), meshes.group(axis)
    assert meshes.group("fsdp") is dist.group.WORLD
    made = {call.kwargs["group_desc"]: options_of(call) for call in nccl.new_group.call_args_list}
    assert made == {
        "gradients of dp_shard+fsdp+batch+loss": ({}, False),
        "gradients of edp": ({"max_ctas": 8}, True),
        "edp": ({"max_ctas": 8}, True),
    }
    assert len(meshes.known_groups("edp")) == 2 and meshes.known_groups("ep") == []


def groups_made_by(rank: int, words: list[str]) -> list[tuple[int, ...]]:
    """The groups that one of 16 ranks asks torch for while it lays a model out."""
    job = load_job(["--config", "configs/deepseek_v3/debugmodel.toml", *words])
    with watched_world(rank, 16) as new_group:
        plan = make_plan(job, tiny(job), 16, ranks_per_node=2)
        meshes = plan.dims.build_mesh("cpu")
        parts = lay_out(plan, meshes).parts
        make_joined_groups(job.optimizer, dict(parts[0].named_parameters()), meshes.group)
    return [tuple(call.args[0]) for call in new_group.call_args_list]


def test_all_ranks_make_groups_at_once_as_a_split_of_the_world_needs() -> None:
    words = "--parallelism.tensor_parallel_degree 2 --parallelism.expert_parallel_degree 4 "
    words += "--parallelism.expert_parallel_comm_backend deduplicated --optimizer.name Muon"
    by_rank = [groups_made_by(rank, words.split()) for rank in range(16)]
    assert len(by_rank[0]) >= 6
    for groups in zip(*by_rank, strict=True):
        assert sorted(chain(*set(groups))) == list(range(16))
