"""The Triton kernel of permute_indices: one launch, one pass over the padded rows."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 512


def fill_indices(
    *,
    arrived_ends_PE: Tensor,
    rank_ends_PE: Tensor,
    offsets_E: Tensor,
    num_rows: int,
    max_rows: int,
) -> tuple[Tensor, Tensor]:
    """As permute_indices.fill_indices_reference, from the padded rows' side.

    Each program owns BLOCK_ROWS rows and finds their expert and source rank by binary search: the
    work is even however uneven the experts are, and no buffer needs a fill beforehand.
    """
    num_ranks, num_experts = rank_ends_PE.shape
    source_R = rank_ends_PE.new_empty(max_rows)
    position_R = rank_ends_PE.new_empty(num_rows)
    num_programs = triton.cdiv(max(max_rows, num_rows), BLOCK_ROWS)
    if num_programs:
        _fill_indices_kernel[(num_programs,)](
            arrived_ends_PE,
            rank_ends_PE,
            offsets_E,
            source_R,
            position_R,
            num_rows,
            max_rows,
            NUM_RANKS=num_ranks,
            NUM_EXPERTS=num_experts,
            RANK_STEPS=num_ranks.bit_length(),
            EXPERT_STEPS=num_experts.bit_length(),
            BLOCK=BLOCK_ROWS,
        )
    return source_R, position_R


@triton.jit
def _count_ends_up_to(
    ends_ptr, index, NUM: tl.constexpr, STRIDE: tl.constexpr, STEPS: tl.constexpr
):
    """How many of NUM ascending ends are <= index, elementwise: the segment that index lies in.

    STEPS halvings narrow the NUM + 1 possible answers down to one. ends_ptr: a pointer per element.
    """
    low = tl.zeros_like(index)
    high = low + NUM
    for _ in range(STEPS):
        is_open = low < high
        middle = (low + high) // 2
        end = tl.load(ends_ptr + middle * STRIDE, mask=is_open, other=0)
        is_past = is_open & (end <= index)
        low = tl.where(is_past, middle + 1, low)
        high = tl.where(is_open & (end > index), middle, high)
    return low


@triton.jit(do_not_specialize=["num_rows", "max_rows"])
def _fill_indices_kernel(
    arrived_ends_ptr,
    rank_ends_ptr,
    offsets_ptr,
    source_ptr,
    position_ptr,
    num_rows,
    max_rows,
    NUM_RANKS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    RANK_STEPS: tl.constexpr,
    EXPERT_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)

    # Which expert's padded rows, and how far into them.
    no_step = tl.zeros_like(row)
    expert = _count_ends_up_to(offsets_ptr + no_step, row, NUM_EXPERTS, 1, EXPERT_STEPS)
    is_in_group = expert < NUM_EXPERTS
    group_start = tl.load(offsets_ptr + expert - 1, mask=is_in_group & (expert > 0), other=0)
    row_in_group = row - group_start

    # Which source rank's rows of that expert; past the last rank lies the padding.
    column = tl.where(is_in_group, expert, 0)
    rank = _count_ends_up_to(
        rank_ends_ptr + column, row_in_group, NUM_RANKS, NUM_EXPERTS, RANK_STEPS
    )
    is_real = is_in_group & (rank < NUM_RANKS)
    segment = tl.where(is_real, rank * NUM_EXPERTS + column, 0)
    rank_end = tl.load(rank_ends_ptr + segment, mask=is_real, other=0)
    arrived_end = tl.load(arrived_ends_ptr + segment, mask=is_real, other=0)
    arrived = arrived_end - (rank_end - row_in_group)

    tl.store(source_ptr + row, tl.where(is_real, arrived, -1), mask=row < max_rows)
    tl.store(position_ptr + arrived, row, mask=is_real)
    # Arrived rows that no count speaks for: no other program writes them.
    total = tl.load(arrived_ends_ptr + NUM_RANKS * NUM_EXPERTS - 1)
    tl.store(
        position_ptr + row,
        tl.full((BLOCK,), -1, tl.int64),
        mask=(row >= total) & (row < num_rows),
    )
