"""Index maps of dispatch: tokens to rows in expert order, to ranks, and past padding."""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_moe.ops.move_rows import RowMap
from titan_moe.ops.permute_indices import PermuteIndices, max_padded_rows, permute_indices


class SortedRows(NamedTuple):
    """T*K rows ordered by expert; within an expert, by token."""

    tokens: RowMap
    """Rows as copies of tokens."""
    slots: RowMap
    """Rows as copies of flat (token, k) slots, one each."""


def count_experts(experts_TK: Tensor, num_experts: int) -> Tensor:
    """How many of the T*K rows each expert gets: counts_E, int64, without a wait for the device.

    Apart from the sort, which takes longer: counts can be exchanged meanwhile. Integers add up to
    the same sum in any order, so that atomics do no harm here.
    """
    slot_N = experts_TK.flatten()
    return slot_N.new_zeros(num_experts).scatter_add_(0, slot_N, torch.ones_like(slot_N))


def sort_by_expert(experts_TK: Tensor) -> SortedRows:
    """Order the T*K rows by expert, stably."""
    slot_N = experts_TK.flatten().sort(stable=True).indices
    rows_TK = invert(slot_N).view_as(experts_TK)
    return SortedRows(
        tokens=RowMap(slot_N // experts_TK.shape[1], rows_TK),
        slots=RowMap(slot_N, rows_TK.view(-1, 1)),
    )


def invert(order_N: Tensor) -> Tensor:
    """The inverse of a permutation of 0..N-1."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return inverse_N


def pad_to_alignment(counts_PE: Tensor, num_rows: int, row_alignment: int) -> PermuteIndices:
    """Padded expert-major order of `num_rows` rows received in P rank-major parts."""
    max_rows = max_padded_rows(num_rows, counts_PE.shape[1], row_alignment)
    return permute_indices(
        counts_PE, num_rows=num_rows, row_alignment=row_alignment, max_rows=max_rows
    )


def row_map(permuted: PermuteIndices) -> RowMap:
    """From received rows to padded expert-major order."""
    return RowMap(permuted.source_R, permuted.position_R[:, None])


def follow(target_N: Tensor, source_R: Tensor) -> Tensor:
    """target_N[source_R], with padding's -1 kept."""
    if source_R.numel() == target_N.numel():
        return target_N[source_R]
    return torch.where(source_R < 0, -1, target_N[source_R.clamp_min(0)])


def reached_ranks(experts_TK: Tensor, num_local: int, num_ranks: int) -> Tensor:
    """Whether a token has an expert on a rank of `num_local` experts: [T, P], bool."""
    reached_TP = experts_TK.new_zeros(len(experts_TK), num_ranks, dtype=torch.bool)
    return reached_TP.scatter_(1, experts_TK // num_local, True)


def copy_to_ranks(reached_TP: Tensor, most: int) -> RowMap:
    """A copy of each row for each rank that it reaches: rank after rank, in the order of rows.

    Without a wait for the device: the map's `source_R` has room for `most` copies of each row, and
    what follows the last copy has no meaning.

    Args:
        reached_TP: bool.
        most: ranks that one row can reach.
    """
    num_rows, num_ranks = reached_TP.shape
    # Meaningless where there is no copy, as is nth_TP: those go to one place past the end.
    place_TP = (reached_TP.t().flatten().cumsum(0).view(num_ranks, num_rows) - 1).t()
    nth_TP = reached_TP.cumsum(1) - 1
    row_TP = torch.arange(num_rows, device=reached_TP.device)[:, None].expand_as(reached_TP)
    past = num_rows * most
    source = row_TP.new_zeros(past + 1)
    source.scatter_(0, place_TP.where(reached_TP, past).flatten(), row_TP.flatten())
    rows = row_TP.new_full((num_rows, most + 1), -1)
    rows.scatter_(1, nth_TP.where(reached_TP, most), place_TP)
    return RowMap(source[:past], rows[:, :most].contiguous())


def starts(counts: Tensor) -> Tensor:
    """Where each of some consecutive parts begins."""
    return counts.cumsum(0) - counts
