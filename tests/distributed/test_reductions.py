"""FSDP's reduce-scatter over gloo: its sum, and what it sends."""

import pytest
import torch

from titan_moe.runtime.ranks import run_on_ranks

SIZE = 5


def reduced(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """This rank's part, what it must be, and the calls by operation."""
    import torch.distributed as dist

    from titan_moe.distributed.fsdp import ExchangedSum
    from titan_moe.simulate.comm_counter import CommCounter

    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert world is not None
    inputs = [
        torch.randn(ranks * SIZE, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        for seed in range(ranks)
    ]
    comm = ExchangedSum()
    out = comm.allocate((SIZE,), dtype=dtype, device=torch.device("cpu"))
    with CommCounter() as counter:
        counter.groups = {world.group_name: "world"}
        comm(output_tensor=out, input_tensor=inputs[rank], group=world, op=dist.ReduceOp.SUM)
    expected = torch.zeros(SIZE, dtype=dtype)
    for each in inputs:
        expected += each[rank * SIZE : (rank + 1) * SIZE]
    sent = {flow.op: volume for flow, volume in counter.volumes().items()}
    return out, expected, sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_a_sum_in_the_order_of_ranks(dtype: torch.dtype):
    for out, expected, sent in run_on_ranks(reduced, 3, dtype):
        assert torch.equal(out, expected)
        # Two parts of three leave the rank; an all-reduce would send four.
        assert sent == {"all_to_all": (1, 2 * SIZE * dtype.itemsize)}
