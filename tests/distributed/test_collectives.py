"""Operations that collectives must not use on gloo, and groups that meet before the first step."""

import torch
import torch.distributed as dist

from tests.support.operations import Operations, watch_collectives
from titan_moe.comm.collectives import gather_parts
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.runtime.ranks import run_on_ranks


def functional_gathers() -> list[str]:
    """Functional all-gathers of a gather of parts, on one rank of gloo."""
    with Operations() as seen:
        gathered = gather_parts(torch.full((2,), dist.get_rank()), dist.group.WORLD)
    assert gathered.tolist() == [[0, 0], [1, 1]]
    return [name for name in seen.calls if "all_gather_into_tensor" in name]


def test_gloo_gets_no_functional_all_gather():
    """16 of them in flight in a group of one end the process within seconds: gloo's two threads
    write the operation's name without a lock, and this one needs the heap."""
    assert run_on_ranks(functional_gathers, 2) == [[], []]


def connected() -> dict[str, list[list[int]]]:
    """The ranks of the groups that a rank sums over and exchanges in, in the order of the calls."""
    seen: dict[str, list[list[int]]] = {"all_reduce": [], "all_to_all_single": []}
    watch_collectives(
        seen, lambda name, group: seen[name].append(dist.get_process_group_ranks(group))
    )
    dims = ParallelDims(4, pp=2, dp_shard=2, ep=2)
    meshes = dims.build_mesh("cpu")
    meshes.groups.connect(meshes.group("ep"), torch.device("cpu"))
    return seen


def test_connect_meets_all_ranks_of_each_group_and_the_world_last():
    for rank, seen in enumerate(run_on_ranks(connected, 4)):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        # pp, fsdp, ep, world.
        assert seen["all_reduce"] == [[rank % 2, rank % 2 + 2], pair, pair, [0, 1, 2, 3]]
        assert seen["all_to_all_single"] == [pair]
