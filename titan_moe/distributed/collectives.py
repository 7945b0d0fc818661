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


def _exchange(x_RD: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    out_RD = x_RD.new_empty(sum(received), *x_RD.shape[1:])
    dist.all_to_all_single(out_RD, x_RD.contiguous(), received, sent, group=group)
    return out_RD


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
