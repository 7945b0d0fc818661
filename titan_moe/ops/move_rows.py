"""Whole rows by index: copied to where experts need them, and added up where tokens need them.

Copying and adding are each other's transpose, so the backward of each is the forward of the other.
Each reads and writes every row once, which is what bounds it; sums run in a fixed order and nothing
is added atomically, so that a repeat gives the same bits on any device.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from titan_moe.ops.linear import linear
from titan_moe.ops.operation import operation


class RowMap(NamedTuple):
    """Maps rows to the tokens that they copy, and tokens to their rows."""

    source_R: Tensor
    """int64: the token of each row, -1 for padding."""
    rows_TK: Tensor
    """int64: the rows that each token is copied to, at most K; -1 for none."""


def gather_rows(x_TD: Tensor, row_map: RowMap) -> Tensor:
    """Returns x_RD with x_TD[source_R[r]] in row r, zeros in padding. Backward: `combine_rows`."""
    return gathered_rows(x_TD, copy_rows(x_TD.detach(), row_map.source_R), row_map)


def gather_rows_twice(x_TD: Tensor, row_map: RowMap) -> tuple[Tensor, Tensor]:
    """Returns `gather_rows` as two tensors of the same memory, for two readers: the backward adds
    up the gradients of both as it reads them."""

    def copy(x_TD: Tensor) -> tuple[Tensor, Tensor]:
        x_RD = copy_rows(x_TD, row_map.source_R)
        return x_RD, x_RD.detach()

    def add(grad_RD: Tensor, *others: Tensor) -> Tensor:
        return add_rows(grad_RD, others[-1], *others[:-1])

    return linear(x_TD, copy, add, row_map.rows_TK)  # type: ignore[no-any-return]


def gathered_rows(x_TD: Tensor, x_RD: Tensor, row_map: RowMap) -> Tensor:
    """Returns x_RD as `gather_rows` does, from rows that `copy_rows` has copied already: the first
    rows of the map, or all."""
    return linear(x_TD, lambda _: x_RD.detach(), add_rows, row_map.rows_TK)


def combine_rows(y_RD: Tensor, row_map: RowMap) -> Tensor:
    """Returns y_TD, the sum of each token's rows in the order of k. Backward: `gather_rows`.

    Padding rows are not read, nor the map's sources past the rows. Sums of narrow types are float32
    and rounded once.
    """
    # Not saved for the backward: a recomputation would have to come as far as this to find it.
    source_R = row_map.source_R[: len(y_RD)]
    return linear(
        y_RD,
        lambda y_RD: add_rows(y_RD, row_map.rows_TK),
        lambda grad_TD: copy_rows(grad_TD, source_R),
    )


def copy_rows_reference(x_TD: Tensor, source_R: Tensor) -> Tensor:
    """Computes `copy_rows` in plain torch, in two passes where there is padding."""
    padding_R = source_R < 0
    if not padding_R.any():
        return x_TD.index_select(0, source_R)
    if not len(x_TD):  # index_select has nothing to select padding from.
        return x_TD.new_zeros(len(source_R), x_TD.shape[1])
    x_RD = x_TD.index_select(0, source_R.clamp_min(0))
    # A mask would visit all rows.
    return x_RD.index_fill_(0, padding_R.nonzero()[:, 0], 0)


def add_rows_reference(y_RD: Tensor, rows_TK: Tensor, other_RD: Tensor | None = None) -> Tensor:
    """Computes `add_rows` in plain torch.

    embedding_bag adds without writing the T * K rows down, in a fifth of the time of index_select
    and sum; but it does not round narrow sums to nearest even.
    """
    if other_RD is not None:
        return add_rows_reference(y_RD + other_RD, rows_TK)
    present_TK = rows_TK >= 0
    is_full, is_narrow = bool(present_TK.all()), y_RD.dtype.itemsize < 4
    if is_full and (rows_TK.shape[1] == 1 or (is_narrow and rows_TK.shape[1] == 2)):
        first_TD, *second_TD = (y_RD.index_select(0, rows_T) for rows_T in rows_TK.unbind(1))
        return first_TD.add_(second_TD[0]) if second_TD else first_TD
    if is_narrow:
        return add_rows_reference(y_RD.float(), rows_TK).to(y_RD.dtype)
    if is_full:
        return F.embedding_bag(rows_TK, y_RD, mode="sum")
    counts_T = present_TK.sum(1)
    starts_T = counts_T.cumsum(0) - counts_T
    return F.embedding_bag(rows_TK[present_TK], y_RD, starts_T, mode="sum")


@operation("copy_rows", copy_rows_reference, "move_rows_triton")
def copy_rows(x_TD: Tensor, source_R: Tensor) -> Tensor:
    """Gathers rows like `gather_rows`, without a gradient."""
    return x_TD.new_empty(source_R.shape[0], x_TD.shape[1])


@operation("add_rows", add_rows_reference, "move_rows_triton")
def add_rows(y_RD: Tensor, rows_TK: Tensor, other_RD: Tensor | None = None) -> Tensor:
    """Adds up rows like `combine_rows`, without a gradient; those of y + other, each sum
    rounded as autograd would, if there are others."""
    return y_RD.new_empty(rows_TK.shape[0], y_RD.shape[1])
