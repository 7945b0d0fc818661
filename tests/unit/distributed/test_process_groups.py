"""Groups of worlds from 8 to 4096 ranks, in a fake world."""

import pytest
import torch
import torch.distributed as dist

from tests.support.tiny import tiny
from titan_moe.config.parse import load_job, resolve
from titan_moe.distributed.parallel_dims import (
    DENSE_AXES,
    SPARSE_AXES,
    ParallelDims,
    parallel_dims,
)
from titan_moe.distributed.parallelize import lay_out
from titan_moe.distributed.policies import resolve_model
from titan_moe.distributed.process_groups import GroupOptions, ProcessGroups, Traffic
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.simulate.fake_rank import fake_world

LAYOUTS = [
    {"dp_replicate": 1, "ep": 8},
    {"dp_replicate": 2, "ep": 4},
    {"dp_replicate": 2, "tp": 2, "ep": 2, "etp": 2},
    {"pp": 2, "cp": 2, "tp": 2, "ep": 4, "etp": 1},
]


def count_new_groups(world_size: int, degrees: dict[str, int], rank: int) -> tuple[int, list, list]:
    """Ranks of each new_group call, and the ranks of each axis's group, in a fake world."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    calls: list[tuple[int, ...]] = []
    new_group = dist.new_group

    def counting(ranks, *args, **kwargs):
        calls.append(tuple(ranks))
        return new_group(ranks, *args, **kwargs)

    dist.new_group = counting
    meshes = ParallelDims(world_size, **degrees).build_mesh("cpu")
    axes = sorted({*DENSE_AXES, *SPARSE_AXES} - {"dp_shard", "cp"} | {"fsdp"})
    ranks = [dist.get_process_group_ranks(meshes[axis].get_group()) for axis in axes]
    assert len(calls) == len(meshes.groups.all())
    dist.barrier = lambda: None
    return axes, ranks, calls


@pytest.mark.parametrize("world_size", [8, 64, 4096])
@pytest.mark.parametrize("degrees", LAYOUTS)
def test_one_group_per_list_of_ranks_and_class_of_traffic(world_size: int, degrees: dict[str, int]):
    rank = world_size - 3
    axes, ranks, calls = run_on_ranks(count_new_groups, 1, world_size, degrees, rank)[0]
    dims = ParallelDims(world_size, **degrees)
    for axis, members in zip(axes, ranks, strict=True):
        assert tuple(members) == dims.group_of(rank, axis), axis
    tokens = {dims.group_of(rank, axis) for axis in ("pp", "tp", "ep", "etp")}
    parameters = {dims.group_of(rank, axis) for axis in ("dp_replicate", "fsdp", "edp")}
    parameters -= {tuple(range(world_size))}  # The world's own group serves these.
    alone = {(rank,)} & (tokens | parameters)
    expected = len(tokens - alone) + len(parameters - alone) + len(alone)
    assert len(calls) == expected


@pytest.mark.parametrize("device", [None, torch.device("cuda", 1)])
def test_communicators_are_made_with_their_groups_if_asked(monkeypatch, device):
    made = []

    def new_group(ranks, **options):
        made.append((ranks, options["device_id"], options["group_desc"]))
        return object()

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    groups = ProcessGroups(device)
    groups.get((0, 1), GroupOptions(Traffic.TOKENS), "tp+etp")
    groups.get((0,), GroupOptions(Traffic.TOKENS), "pp")
    # A group of one rank has no connections.
    assert made == [([0, 1], device, "tp+etp"), ([0], None, "pp")]


def splits_of_rank(rank: int, ranks_per_node: int) -> list[list[list[int]]]:
    """The split_ranks of each split_group call while a model is laid out, in a fake world."""
    calls: list[list[list[int]]] = []

    def split_group(split_ranks, timeout, pg_options, group_desc):
        calls.append(split_ranks)
        (own,) = (each for each in split_ranks if rank in each)
        return dist.new_group(own, use_local_synchronization=True, group_desc=group_desc)

    keys = ["--config", "configs/deepseek_v3/debugmodel.toml", "--training.seq_len", "64"]
    keys += ["--parallelism.pipeline_parallel_degree", "2"]
    keys += ["--parallelism.expert_parallel_degree", "4"]
    keys += ["--parallelism.expert_parallel_comm_backend", "deduplicated"]
    job = resolve(load_job(keys), 16)
    with fake_world(rank, 16), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "split_group", split_group, raising=True)
        meshes = parallel_dims(job.parallelism, 16).build_mesh(
            "cpu", groups=ProcessGroups(split=True)
        )
        lay_out(job, resolve_model(tiny(job), job), meshes, torch.device("cpu"), ranks_per_node)
    return calls


def test_all_ranks_split_the_world_alike():
    first, *others = [splits_of_rank(rank, ranks_per_node=2) for rank in range(0, 16, 3)]
    assert len(first) == 7 and all(other == first for other in others)
    for partition in first:
        assert sorted(rank for ranks in partition for rank in ranks) == list(range(16))
