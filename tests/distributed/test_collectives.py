"""Collectives of uneven rows, forward and backward, against what one process would compute."""

import pytest
import torch

from titan_moe.runtime.ranks import run_on_ranks

SIZES = [3, 0, 2]


def _rows(rank: int, size: int) -> torch.Tensor:
    return torch.arange(size * 2, dtype=torch.float64).view(size, 2) + 100 * rank


def gather_and_scatter():
    import torch.distributed as dist

    from titan_moe.distributed.collectives import all_gather_rows, reduce_scatter_rows

    rank, group = dist.get_rank(), dist.group.WORLD
    own = _rows(rank, SIZES[rank]).requires_grad_()
    gathered = all_gather_rows(own, SIZES, group)
    weights = torch.arange(1.0, 11.0, dtype=torch.float64).view(5, 2) * (rank + 1)
    (gathered * weights).sum().backward()

    everyones = _rows(rank, sum(SIZES)).requires_grad_()
    scattered = reduce_scatter_rows(everyones, SIZES, group)
    (scattered * (rank + 1)).sum().backward()
    tensors = (gathered, own.grad, scattered, everyones.grad)
    return [tensor.detach() for tensor in tensors]


def test_all_gather_and_reduce_scatter_are_each_others_transpose():
    results = run_on_ranks(gather_and_scatter, len(SIZES))
    whole = torch.cat([_rows(rank, size) for rank, size in enumerate(SIZES)])
    weights = torch.arange(1.0, 11.0, dtype=torch.float64).view(5, 2) * (1 + 2 + 3)
    summed = sum(_rows(rank, sum(SIZES)) for rank in range(len(SIZES)))
    scale = torch.cat([torch.full((size, 2), rank + 1.0) for rank, size in enumerate(SIZES)])
    for rank, (gathered, own_grad, scattered, everyones_grad) in enumerate(results):
        mine = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
        assert torch.equal(gathered, whole)
        assert torch.equal(own_grad, weights[mine])
        assert torch.equal(scattered, summed[mine])
        assert torch.equal(everyones_grad, scale.double())


def exchange(sent_PP: list[list[int]]):
    import torch.distributed as dist

    from titan_moe.distributed.collectives import all_to_all_rows

    rank = dist.get_rank()
    sent, received = sent_PP[rank], [row[rank] for row in sent_PP]
    x = _rows(rank, sum(sent)).requires_grad_()
    y = all_to_all_rows(x, sent, received, dist.group.WORLD)
    (y * (rank + 1)).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("sent_PP", [[[1, 2], [0, 3]], [[0, 0], [4, 0]], [[5]]])
def test_all_to_all_sends_gradients_back_where_rows_came_from(sent_PP: list[list[int]]):
    results = run_on_ranks(exchange, len(sent_PP), sent_PP)
    parts = [_rows(rank, sum(sent)).split(sent) for rank, sent in enumerate(sent_PP)]
    for rank, (received, grad) in enumerate(results):
        assert torch.equal(received, torch.cat([part[rank] for part in parts]))
        scale = [torch.full((n, 2), to + 1.0) for to, n in enumerate(sent_PP[rank])]
        assert torch.equal(grad, torch.cat(scale).double())


def functional_gathers() -> list[str]:
    """Functional all-gathers of a gather of parts, on one rank of gloo."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from titan_moe.distributed.collectives import gather_parts

    seen = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Operations():
        gathered = gather_parts(_rows(dist.get_rank(), 2), dist.group.WORLD)
    assert torch.equal(gathered, torch.stack([_rows(rank, 2) for rank in (0, 1)]))
    return [name for name in seen if "all_gather_into_tensor" in name]


def test_gloo_gets_no_functional_all_gather():
    """16 of them in flight in a group of one end the process within seconds: gloo's two threads
    write the operation's name without a lock, and this one needs the heap."""
    assert run_on_ranks(functional_gathers, 2) == [[], []]
