"""Index maps of dispatch: tokens to rows in expert order, to ranks, and past padding.

After an all-to-all, the rows of P source ranks lie one rank after the other, each rank's rows
sorted by local expert. A grouped GEMM wants them expert after expert, each expert's rows padded to
a multiple of `row_alignment`. Both directions are returned as index maps, so that dispatch and
combine are gathers. Everything stays on the device of the counts: no host sync.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.ops.move_rows import RowMap
from titan_moe.ops.operation import operation


class PermuteIndices(NamedTuple):
    """The two index maps and the group boundaries, all on the device of the counts."""

    source_R: Tensor
    """int64 [max_rows]: the received row of each padded row; -1 for padding and the tail."""
    position_R: Tensor
    """int64 [num_rows]: the padded row of each received row; -1 past the sum of the counts."""
    offsets_E: Tensor
    """int32 [E]: where each expert's padded rows end, as grouped_mm wants them."""


def max_padded_rows(num_rows: int, num_experts: int, row_alignment: int) -> int:
    """Returns the most padded rows that num_rows routed rows can need: a multiple of row_alignment.

    The worst case: one expert has one row more than whole blocks, and all others a block each
    without rows. The rows needed are a multiple of row_alignment, so rounding that bound down loses
    nothing.
    """
    if row_alignment == 1:
        return num_rows
    bound = max(num_rows - 1, 0) + num_experts * row_alignment
    return bound // row_alignment * row_alignment


def permute_indices(counts_PE: Tensor, num_rows: int, row_alignment: int) -> PermuteIndices:
    """Index maps between rank-major receiving order and padded expert-major order.

    Within an expert, rows keep the order of the source ranks, then the order of receiving. An
    expert without rows takes a block of padding where row_alignment is above 1, because GEMMs of no
    rows are reported to leave wrong gradients (pytorch issue 172439). Padding lies inside the
    groups, where a GEMM reads it: the caller fills it with zeros.

    Args:
        counts_PE: int32 or int64 [P, E], rows that rank p sent for local expert e.
        num_rows: rows of the received buffer, at least the sum of the counts.
        row_alignment: each expert's rows are padded to a multiple of this.
    """
    max_rows = max_padded_rows(num_rows, counts_PE.shape[1], row_alignment)
    return PermuteIndices(*_permute_indices(counts_PE, num_rows, row_alignment, max_rows))


def permute_indices_reference(
    counts_PE: Tensor, num_rows: int, row_alignment: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the fields of PermuteIndices in plain torch, from the received rows' side."""
    # The end of each (rank, expert) segment of rows within its expert's rows.
    rank_ends_PE = counts_PE.contiguous().cumsum(0)
    counts_E = rank_ends_PE[-1]
    blocks_E = (counts_E + (row_alignment - 1)) // row_alignment
    if row_alignment > 1:
        blocks_E = blocks_E.clamp_min(1)
    offsets_E = (blocks_E * row_alignment).cumsum(0, dtype=torch.int32)
    # The end of each segment in receiving order.
    received_ends_PE = counts_PE.flatten().cumsum(0).view_as(rank_ends_PE)

    # Rows move as whole segments, each by one shift. Ends serve as well as starts: they differ by
    # the segment's length on both sides.
    expert_starts_E = F.pad(offsets_E[:-1], (1, 0))
    shift_PE = expert_starts_E + rank_ends_PE - received_ends_PE

    # One more segment holds the rows past the sum of the counts; they go to a slot past the end.
    received_ends = received_ends_PE.flatten()
    lengths = received_ends.diff(
        prepend=received_ends.new_zeros(1), append=received_ends.new_tensor([num_rows])
    )
    shift_R = F.pad(shift_PE.flatten(), (0, 1)).repeat_interleave(lengths, output_size=num_rows)
    row_R = torch.arange(num_rows, device=offsets_E.device)
    is_unused_R = row_R >= received_ends[-1]
    slot_R = (row_R + shift_R).masked_fill_(is_unused_R, max_rows)

    source_R = row_R.new_full((max_rows + 1,), -1).scatter_(0, slot_R, row_R)[:max_rows]
    position_R = slot_R.masked_fill_(is_unused_R, -1)
    return source_R, position_R, offsets_E


@operation("permute_indices", permute_indices_reference, "permute_indices_triton")
def _permute_indices(
    counts_PE: Tensor, num_rows: int, row_alignment: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        counts_PE.new_empty(max_rows, dtype=torch.int64),
        counts_PE.new_empty(num_rows, dtype=torch.int64),
        counts_PE.new_empty(counts_PE.shape[1], dtype=torch.int32),
    )


class Sorted(NamedTuple):
    """T*K rows in the order of experts, and within an expert of tokens."""

    tokens: RowMap
    """Rows as copies of tokens."""
    slots: RowMap
    """Rows as copies of flat (token, k) slots, one each."""
    counts_E: Tensor
    """int64: rows of each expert."""


def sort_by_expert(experts_TK: Tensor, num_experts: int) -> Sorted:
    """Sorts the choices of experts; waits for nothing."""
    token_N, slot_N, rows_TK, counts_E = _sort_by_expert(experts_TK, num_experts)
    return Sorted(RowMap(token_N, rows_TK), RowMap(slot_N, rows_TK.view(-1, 1)), counts_E)


def sort_by_expert_reference(
    experts_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes, for `sort_by_expert`, each row's token and slot, each slot's row, and counts."""
    experts_N = experts_TK.flatten()
    slot_N = experts_N.sort(stable=True).indices
    rows_TK = invert(slot_N).view_as(experts_TK)
    counts_E = slot_N.new_zeros(num_experts).scatter_add_(0, experts_N, torch.ones_like(experts_N))
    return slot_N // experts_TK.shape[1], slot_N, rows_TK, counts_E


@operation("sort_by_expert", sort_by_expert_reference, "sort_rows_triton")
def _sort_by_expert(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    token_N, slot_N = (experts_TK.new_empty(experts_TK.numel()) for _ in range(2))
    return token_N, slot_N, torch.empty_like(experts_TK), experts_TK.new_empty(num_experts)


def invert(order_N: Tensor) -> Tensor:
    """The inverse of a permutation of 0..N-1."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return inverse_N


def row_map(permuted: PermuteIndices) -> RowMap:
    """Returns the map from received rows to padded expert-major order."""
    return RowMap(permuted.source_R, permuted.position_R[:, None])


def follow(target_N: Tensor, source_R: Tensor) -> Tensor:
    """Returns target_N[source_R]; -1, which marks padding, stays -1."""
    if source_R.numel() == target_N.numel():
        return target_N[source_R]
    return F.pad(target_N, (0, 1), value=-1)[source_R]  # -1 is the last, also of no rows.


def reached_ranks(experts_TK: Tensor, num_local: int, num_ranks: int) -> Tensor:
    """Returns whether a token has an expert on a rank of `num_local` experts: [T, P], bool."""
    reached_TP = experts_TK.new_zeros(len(experts_TK), num_ranks, dtype=torch.bool)
    return reached_TP.scatter_(1, experts_TK // num_local, True)


def copies_to_ranks_reference(
    experts_TK: Tensor, num_local: int, num_ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes `copies_to_ranks` in plain torch."""
    top_k, rank_TK = experts_TK.shape[1], experts_TK // num_local
    reached_TP = reached_ranks(experts_TK, num_local, num_ranks)
    place_TP, counts_P = _places(reached_TP), reached_TP.sum(0)
    copy_TK = place_TP.gather(1, rank_TK) - starts(counts_P)[rank_TK]
    k_K = torch.arange(top_k, device=copy_TK.device)
    slots_TK = torch.add(k_K, copy_TK, alpha=top_k).int()
    return *_copy(reached_TP, place_TP, min(top_k, num_ranks)), slots_TK, counts_P


@operation("copies_to_ranks", copies_to_ranks_reference, "sort_rows_triton")
def copies_to_ranks(
    experts_TK: Tensor, num_local: int, num_ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copies tokens to the ranks of their experts, `num_local` on each; waits for nothing.

    Returns the two fields of the map of `copy_to_ranks`; slots on the ranks, int32 [T, K]: a
    choice's copy, among those for its rank, times K, plus its k; and the number of copies for each
    rank, [P].
    """
    num_tokens, top_k = experts_TK.shape
    most = min(top_k, num_ranks)
    return (
        experts_TK.new_empty(num_tokens * most),
        experts_TK.new_empty(num_tokens, most),
        experts_TK.new_empty(num_tokens, top_k, dtype=torch.int32),
        experts_TK.new_empty(num_ranks),
    )


def copy_to_ranks(reached_TP: Tensor, most: int) -> RowMap:
    """Maps each row to a copy for each rank that it reaches: rank after rank, in the order of rows.

    Does not wait for the device: the map's `source_R` has room for `most` copies of each row, and
    -1 after the last copy.

    Args:
        reached_TP: bool.
        most: ranks that one row can reach.
    """
    return _copy(reached_TP, _places(reached_TP), most)


def _places(reached_TP: Tensor) -> Tensor:
    """Returns the place of each copy, [T, P]; the previous copy's where there is none.

    Sums a flat vector: a sum over the first of two dims has one thread for each column on a GPU.
    """
    reached_PT = reached_TP.t()
    return (reached_PT.flatten().cumsum(0) - 1).view(reached_PT.shape).t()


def _copy(reached_TP: Tensor, place_TP: Tensor, most: int) -> RowMap:
    source = reached_TP.t().nonzero_static(size=len(reached_TP) * most)[:, 1].contiguous()
    # Ranks that a row does not reach write to a column before the first, which is cut off.
    nth_TP = reached_TP.cumsum(1) * reached_TP
    rows = place_TP.new_full((len(reached_TP), most + 1), -1)
    return RowMap(source, rows.scatter_(1, nth_TP, place_TP)[:, 1:].contiguous())


def starts(counts: Tensor) -> Tensor:
    """Returns the start of each of some consecutive segments, given their lengths."""
    return counts.cumsum(0) - counts
