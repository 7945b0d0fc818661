"""Rows to expert order and back, by gathers alone.

Moving tokens to rows and rows to tokens are each other's transpose, so each one's backward is the
other's forward: nothing is ever scattered or added atomically, and a repeat gives the same bits on
any device.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.ops.move_rows import add_rows, copy_rows


def gather_rows(x_TD: Tensor, source_R: Tensor, rows_TK: Tensor) -> Tensor:
    """Copy token `source_R[r]` into row r; rows whose source is -1 become zeros.

    Args:
        x_TD: tokens.
        source_R: the token of each row, -1 for padding.
        rows_TK: the inverse map, the K rows that each token was copied to; the backward adds
            them in the order of k.

    Returns:
        x_RD.
    """
    return _GatherRows.apply(x_TD, source_R, rows_TK)


def combine_rows(y_RD: Tensor, rows_TK: Tensor, source_R: Tensor) -> Tensor:
    """Add up each token's K rows, in the order of k: y_TD. The transpose of `gather_rows`."""
    return _CombineRows.apply(y_RD, rows_TK, source_R)


def invert(order_N: Tensor) -> Tensor:
    """The inverse of a permutation of 0..N-1."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return inverse_N


def _copy(x_TD: Tensor, source_R: Tensor, num_real: int) -> Tensor:
    return copy_rows(x_TD, source_R, is_padded=source_R.numel() != num_real)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_TD: Tensor, source_R: Tensor, rows_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_TK)
        return _copy(x_TD, source_R, rows_TK.numel())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        (rows_TK,) = ctx.saved_tensors
        return add_rows(grad_RD, rows_TK), None, None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, y_RD: Tensor, rows_TK: Tensor, source_R: Tensor) -> Tensor:
        ctx.save_for_backward(source_R)
        ctx.num_real = rows_TK.numel()  # type: ignore[attr-defined]
        return add_rows(y_RD, rows_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD: Tensor):  # type: ignore[override, no-untyped-def]
        (source_R,) = ctx.saved_tensors
        return _copy(grad_TD, source_R, ctx.num_real), None, None
