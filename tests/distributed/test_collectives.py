"""Collectives on gloo: operations that it must not get, FSDP's sums over it, and groups that meet
before the first step."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.support.operations import Operations, watch_collectives
from titan_moe.comm.collectives import gather_parts, gather_tokens, scatter_tokens
from titan_moe.distributed.fsdp import ExchangedSum, GroupSum
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.simulate.comm_counter import CommCounter


def gathers_of_gloo() -> int:
    """The all-gathers under their short name by which a gather of parts and DTensor's run."""
    short: list[int] = []
    watch_collectives(["all_gather"], lambda _, group: short.append(group.size()))
    rank, world = dist.get_rank(), dist.group.WORLD
    mesh = DeviceMesh.from_group(world, "cpu")
    assert gather_parts(torch.full((2,), rank), world).tolist() == [[0, 0], [1, 1]]
    own = DTensor.from_local(torch.full((1,), rank), mesh, [Shard(0)])
    assert own.full_tensor().tolist() == [0, 1]
    return len(short)


def test_gloo_gathers_under_a_short_name():
    """16 functional all-gathers in flight in a group of one end the process within seconds: gloo's
    two threads write the operation's name without a lock, and torch's kernel needs the heap."""
    assert run_on_ranks(gathers_of_gloo, 2) == [2, 2]


def connected() -> dict[str, list[list[int]]]:
    """The ranks of the groups that a rank sums over and exchanges in, in the order of the calls."""
    seen: dict[str, list[list[int]]] = {"all_reduce": [], "all_to_all_single": []}
    watch_collectives(
        seen, lambda name, group: seen[name].append(dist.get_process_group_ranks(group))
    )
    meshes = ParallelDims(4, pp=2, dp_shard=2, ep=2).build_mesh("cpu")
    meshes.groups.connect(meshes.group("ep"), torch.device("cpu"))
    return seen


def test_connect_meets_all_ranks_of_each_group_and_the_world_last():
    for rank, seen in enumerate(run_on_ranks(connected, 4)):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        # pp, fsdp, ep, world.
        assert seen["all_reduce"] == [[rank % 2, rank % 2 + 2], pair, pair, [0, 1, 2, 3]]
        assert seen["all_to_all_single"] == [pair]


def moved_tokens(batch: int) -> tuple[list[torch.Tensor], int]:
    """All ranks' tokens gathered and then summed to this one's, with the gradient of its tokens,
    for one more rank's number in each; and the copies made."""
    group, rank = dist.group.WORLD, dist.get_rank()
    x = torch.arange(batch * 6, dtype=torch.float64).view(batch, 3, 2).add(100 * rank)
    x.requires_grad_()
    with Operations() as seen:
        gathered = gather_tokens(x, group)
        own = scatter_tokens(gathered * (rank + 1), group)
        (grad,) = torch.autograd.grad(own.sum(), x)
    return [gathered.detach(), own.detach(), grad], seen.calls["aten.cat"]


@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_of_one_sequence_are_gathered_and_scattered_without_a_copy(batch: int) -> None:
    parts = torch.arange(batch * 6, dtype=torch.float64).view(batch, 3, 2)
    whole = torch.cat([parts, parts + 100], 1)
    for rank, ((gathered, own, grad), copies) in enumerate(run_on_ranks(moved_tokens, 2, batch)):
        assert torch.equal(gathered, whole)
        assert torch.equal(own, 3 * (parts + 100 * rank)) and torch.equal(grad, 0 * grad + 3)
        assert copies == (0 if batch == 1 else 4)


SIZE = 5


def reduced(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """This rank's part, what it must be, and the calls by operation."""
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    inputs = [
        torch.randn(ranks * SIZE, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        for seed in range(ranks)
    ]
    comm = ExchangedSum(world)
    out = comm.allocate((SIZE,), dtype=dtype, device=torch.device("cpu"))
    with CommCounter() as counter:
        counter.groups = {world.group_name: "world"}
        comm(output_tensor=out, input_tensor=inputs[rank], group=None, op=dist.ReduceOp.SUM)
    same = torch.empty_like(out)
    GroupSum(world)(output_tensor=same, input_tensor=inputs[rank], group=None, op=dist.ReduceOp.SUM)
    torch.testing.assert_close(same, out)
    expected = torch.zeros(SIZE, dtype=dtype)
    for each in inputs:
        expected += each[rank * SIZE : (rank + 1) * SIZE]
    sent = {flow.op: volume for flow, volume in counter.volumes().items()}
    return out, expected, sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fsdps_reduce_scatter_sums_in_the_order_of_ranks_and_sends_parts_alone(
    dtype: torch.dtype,
):
    for out, expected, sent in run_on_ranks(reduced, 3, dtype):
        assert torch.equal(out, expected)
        # Two parts of three leave the rank; an all-reduce would send four.
        assert sent == {"all_to_all": (1, 2 * SIZE * dtype.itemsize)}
