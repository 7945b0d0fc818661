"""Rows copied a varying number of times each, and added up again.

As in `permute`, copying and adding are each other's transpose, each one's backward the other's
forward, and sums run in a fixed order without atomics. Here rows have different numbers of copies:
those with most stand first, so that every term of the sums is one slice.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.moe.permute import invert
from titan_moe.ops.move_rows import copy_rows


class Copies(NamedTuple):
    """Which rows are copies of which: M rows with N copies, at least one each, in R >= N places."""

    source_R: Tensor
    """The row of each place, -1 for padding."""
    place_N: Tensor
    """The place of each row's first copy, then of each second one, and so on, each time in the
    order of `order_M`."""
    sizes: list[int]
    """How many rows have a first copy, a second one, ...: never rising."""
    order_M: Tensor
    """Where each row stands when those with most copies stand first."""


def copy_ragged(x_MD: Tensor, copies: Copies) -> Tensor:
    """x_RD: every copy in its place, zeros in padding. Backward: `add_ragged`."""
    return _Copy.apply(x_MD, copies)


def add_ragged(y_RD: Tensor, copies: Copies) -> Tensor:
    """The sum of each row's copies, in their order: y_MD. Backward: `copy_ragged`."""
    return _Add.apply(y_RD, copies)


def copy_present(x_TD: Tensor, source_R: Tensor, rows_TK: Tensor) -> Tensor:
    """As `gather_rows`, of which rows_TK may hold -1: a copy that was not made."""
    return _CopyPresent.apply(x_TD, source_R, rows_TK)


def add_present(y_RD: Tensor, rows_TK: Tensor, source_R: Tensor) -> Tensor:
    """As `combine_rows`, of which rows_TK may hold -1: a copy that was not made."""
    return _AddPresent.apply(y_RD, rows_TK, source_R)


class Spread(NamedTuple):
    """Copies of rows for ranks, before the host knows how many there are."""

    sent_P: Tensor
    """Copies for each rank."""
    sizes_I: Tensor
    """As `Copies.sizes`."""
    source: Tensor
    """As `Copies.source_R`, and something past its end."""
    place: Tensor
    order_M: Tensor

    def copies(self, sizes: list[int]) -> Copies:
        """Of as many as `sizes_I` says, on the host."""
        num_copies = sum(sizes)
        return Copies(self.source[:num_copies], self.place[:num_copies], sizes, self.order_M)


def spread(reached_MP: Tensor, most: int) -> Spread:
    """A copy of each row for each rank that it reaches: rank after rank, in the order of rows.

    Args:
        reached_MP: bool.
        most: ranks that one row can reach.
    """
    num_rows, degree = reached_MP.shape
    # Where each copy stands among all, rank after rank; meaningless where there is none.
    place_PM = reached_MP.t().flatten().cumsum(0).view(degree, num_rows) - 1
    place_MP = place_PM.t()
    count_M = reached_MP.sum(1)
    order_M = most_first(count_M)
    sizes_I = (count_M[:, None] > torch.arange(most, device=count_M.device)).sum(0)
    nth_MP = (reached_MP.cumsum(1) - 1).clamp_min(0)
    index_MP = starts(sizes_I)[nth_MP] + order_M[:, None]
    # What is no copy goes to one slot past the end.
    past = num_rows * most
    row_MP = torch.arange(num_rows, device=reached_MP.device)[:, None].expand_as(reached_MP)
    slots = place_MP.new_zeros(2, past + 1)
    source = slots[0].scatter_(0, place_MP.where(reached_MP, past).flatten(), row_MP.flatten())
    place = slots[1].scatter_(0, index_MP.where(reached_MP, past).flatten(), place_MP.flatten())
    return Spread(reached_MP.sum(0), sizes_I, source, place, order_M)


def most_first(count_M: Tensor) -> Tensor:
    """Where each row stands when those with most copies stand first."""
    return invert(count_M.sort(descending=True, stable=True).indices)


def starts(counts: Tensor) -> Tensor:
    """Where each of some consecutive parts begins."""
    return counts.cumsum(0) - counts


def _copy(x_MD: Tensor, copies: Copies) -> Tensor:
    return copy_rows(x_MD, copies.source_R, is_padded=len(copies.source_R) != len(copies.place_N))


def _add(y_RD: Tensor, copies: Copies) -> Tensor:
    first_M, *others = copies.place_N.split(copies.sizes)
    sums_MD = y_RD.index_select(0, first_M)
    if others and sums_MD.dtype.itemsize < 4:
        sums_MD = sums_MD.float()  # Rounded once, at the end.
    for place_M in others:
        if len(place_M):
            sums_MD[: len(place_M)] += y_RD.index_select(0, place_M)
    return sums_MD.to(y_RD.dtype).index_select(0, copies.order_M)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_MD: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies  # type: ignore[attr-defined]
        return _copy(x_MD, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        return _add(grad_RD, ctx.copies), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, y_RD: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies  # type: ignore[attr-defined]
        return _add(y_RD, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_MD: Tensor):  # type: ignore[override, no-untyped-def]
        return _copy(grad_MD, ctx.copies), None


def _add_present(y_RD: Tensor, rows_TK: Tensor) -> Tensor:
    y_ND = copy_rows(y_RD, rows_TK.flatten(), is_padded=True)
    return y_ND.unflatten(0, rows_TK.shape).sum(1)


class _CopyPresent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_TD: Tensor, source_R: Tensor, rows_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_TK)
        return copy_rows(x_TD, source_R, is_padded=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        (rows_TK,) = ctx.saved_tensors
        return _add_present(grad_RD, rows_TK), None, None


class _AddPresent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, y_RD: Tensor, rows_TK: Tensor, source_R: Tensor) -> Tensor:
        ctx.save_for_backward(source_R)
        return _add_present(y_RD, rows_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD: Tensor):  # type: ignore[override, no-untyped-def]
        (source_R,) = ctx.saved_tensors
        return copy_rows(grad_TD, source_R, is_padded=True), None, None
