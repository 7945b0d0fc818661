"""Where each routed row goes: from rank-major receiving order to padded, expert-major order.

After an all-to-all, the rows of P source ranks lie one rank after the other, each rank's rows
sorted by local expert. A grouped GEMM wants them expert after expert, each expert's rows padded to
a multiple of `row_alignment`. Both directions are returned as index maps, so that dispatch and
combine are gathers. Everything stays on the device of the counts: no host sync.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PermuteIndices:
    """The two index maps and the group boundaries, all on the device of the counts."""

    source_R: Tensor
    """int64 [max_rows]: the received row of each padded row; -1 for padding and the tail."""
    position_R: Tensor
    """int64 [num_rows]: the padded row of each received row; -1 past the sum of the counts."""
    offsets_E: Tensor
    """int32 [E]: where each expert's padded rows end, as grouped_mm wants them."""
    counts_E: Tensor
    """int64 [E]: each expert's real rows."""


def max_padded_rows(num_rows: int, num_experts: int, row_alignment: int) -> int:
    """The most padded rows that num_rows routed rows can need: a multiple of row_alignment.

    Only experts that got a row are padded, by at most row_alignment - 1 rows each; rounding that
    bound down loses nothing, because the rows needed are a multiple of row_alignment themselves.
    """
    bound = num_rows + min(num_experts, num_rows) * (row_alignment - 1)
    return bound // row_alignment * row_alignment


def permute_indices(
    counts_PE: Tensor, *, num_rows: int, row_alignment: int, max_rows: int
) -> PermuteIndices:
    """Index maps between rank-major receiving order and padded expert-major order.

    Within an expert, rows keep the order of the source ranks, then the order of receiving. An
    expert without rows takes no padded rows either. Padding lies inside the groups, where a GEMM
    reads it: the caller fills it with zeros.

    Args:
        counts_PE: int32 or int64 [P, E], rows that rank p sent for local expert e.
        num_rows: rows of the received buffer, at least the sum of the counts.
        row_alignment: each expert's rows are padded to a multiple of this.
        max_rows: rows of the padded buffer, at least the padded rows: see max_padded_rows.
    """
    sizes = {"num_rows": num_rows, "row_alignment": row_alignment, "max_rows": max_rows}
    if counts_PE.is_cuda:
        # Imported here: a CPU run has no Triton and no use for it.
        from titan_moe.ops import permute_indices_triton

        return PermuteIndices(*permute_indices_triton.permute_indices(counts_PE, **sizes))
    return PermuteIndices(*permute_indices_reference(counts_PE, **sizes))


def permute_indices_reference(
    counts_PE: Tensor, *, num_rows: int, row_alignment: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What PermuteIndices holds, in plain torch, from the received rows' side."""
    # Where each (rank, expert) segment of rows ends within its expert's rows.
    rank_ends_PE = counts_PE.contiguous().cumsum(0)
    counts_E = rank_ends_PE[-1]
    blocks_E = (counts_E + (row_alignment - 1)) // row_alignment
    offsets_E = (blocks_E * row_alignment).cumsum(0, dtype=torch.int32)
    # And where it ends in receiving order.
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
    return source_R, position_R, offsets_E, counts_E
