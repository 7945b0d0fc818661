"""Groups of worlds from 8 to 4096 ranks, in a fake world."""

import pytest
import torch.distributed as dist

from titan_moe.distributed.mesh import build_mesh
from titan_moe.distributed.parallel_dims import (
    DENSE_AXES,
    SPARSE_AXES,
    ParallelDims,
)
from titan_moe.runtime.ranks import run_on_ranks

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
    meshes = build_mesh(ParallelDims(world_size, **degrees), "cpu")
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
