"""Collectives with uneven sizes that autograd can pass through."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup


def all_to_all_rows(
    x_RD: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup
) -> Tensor:
    """Send `sent[p]` consecutive rows to each rank p, and receive `received[p]` rows from it.

    The backward is the reverse exchange of the gradients.

    Returns:
        The received rows, in the order of their source ranks.
    """
    return _AllToAllRows.apply(x_RD, list(sent), list(received), group)


def all_gather_rows(x_RD: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """All ranks' rows in rank order; rank p has `sizes[p]`. Backward: `reduce_scatter_rows`.

    Sent as an all-to-all, which takes uneven sizes on every backend and moves the same bytes; its
    price is a send buffer with a copy for each rank.
    """
    return _AllGatherRows.apply(x_RD, list(sizes), group)


def reduce_scatter_rows(x_RD: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """The sum over ranks of this rank's `sizes[rank]` rows. Backward: `all_gather_rows`.

    The terms are added in rank order, here: the same bits at every repeat, whatever the backend.
    """
    return _ReduceScatterRows.apply(x_RD, list(sizes), group)


def _exchange(x_RD: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    if len(sent) == 1:
        return x_RD
    out_RD = x_RD.new_empty(sum(received), *x_RD.shape[1:])
    dist.all_to_all_single(out_RD, x_RD.contiguous(), received, sent, group=group)
    return out_RD


def _all_gather(x_RD: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    copies = x_RD.repeat(len(sizes), *[1] * (x_RD.ndim - 1))
    return _exchange(copies, [len(x_RD)] * len(sizes), sizes, group)


def _reduce_scatter(x_RD: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    own = sizes[dist.get_rank(group)]
    terms_RD = _exchange(x_RD, sizes, [own] * len(sizes), group)
    return terms_RD.unflatten(0, (len(sizes), own)).sum(0)


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x_RD: Tensor, sent: list[int], received: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.exchange = (received, sent, group)  # type: ignore[attr-defined]
        return _exchange(x_RD, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        return _exchange(grad_RD, *ctx.exchange), None, None, None


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_RD: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
        ctx.layout = (sizes, group)  # type: ignore[attr-defined]
        return _all_gather(x_RD, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        return _reduce_scatter(grad_RD, *ctx.layout), None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_RD: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
        ctx.layout = (sizes, group)  # type: ignore[attr-defined]
        return _reduce_scatter(x_RD, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        return _all_gather(grad_RD, *ctx.layout), None, None
