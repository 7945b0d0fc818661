"""The Triton kernel of permute_indices: one launch, one pass over the padded rows."""

import triton
import triton.language as tl
from torch import Tensor, int32, int64

BLOCK_ROWS = 512


def permute_indices(
    counts_PE: Tensor, num_rows: int, row_alignment: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `permute_indices.permute_indices_reference`, from the padded rows' side.

    Each program owns BLOCK_ROWS rows, and adds up for itself those counts that say where they are:
    P * E numbers that lie in the cache, against five launches for their sums. The work is even
    however uneven the experts are, and no buffer needs a fill beforehand.
    """
    counts_PE = counts_PE.contiguous()
    num_ranks, num_experts = counts_PE.shape
    source_R = counts_PE.new_empty(max_rows, dtype=int64)
    position_R = counts_PE.new_empty(num_rows, dtype=int64)
    offsets_E = counts_PE.new_empty(num_experts, dtype=int32)
    # At least one: a program must write that there is nothing.
    num_programs = max(triton.cdiv(max(max_rows, num_rows), BLOCK_ROWS), 1)
    _permute_indices_kernel[(num_programs,)](
        counts_PE,
        source_R,
        position_R,
        offsets_E,
        num_rows,
        max_rows,
        NUM_RANKS=num_ranks,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        ALIGNMENT=row_alignment,
        BLOCK=BLOCK_ROWS,
    )
    return source_R, position_R, offsets_E


@triton.jit(do_not_specialize=["num_rows", "max_rows"])
def _permute_indices_kernel(
    counts_ptr,
    source_ptr,
    position_ptr,
    offsets_ptr,
    num_rows,
    max_rows,
    NUM_RANKS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    first = program.to(tl.int64) * BLOCK
    row = first + tl.arange(0, BLOCK)

    # The places of each expert's padded rows.
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < NUM_EXPERTS
    totals = tl.zeros((EXPERTS,), dtype=tl.int64)
    for rank in range(NUM_RANKS):
        totals += tl.load(counts_ptr + rank * NUM_EXPERTS + expert, mask=is_expert, other=0)
    blocks = (totals + (ALIGNMENT - 1)) // ALIGNMENT
    padded = tl.maximum(blocks, 1 if ALIGNMENT > 1 else 0) * ALIGNMENT
    ends = tl.cumsum(padded, 0)
    if program == 0:
        tl.store(offsets_ptr + expert, ends.to(tl.int32), mask=is_expert)

    # Only experts that own some of the program's rows.
    source = tl.full((BLOCK,), -1, tl.int64)
    first_expert = tl.sum((is_expert & (ends <= first)).to(tl.int32), 0)
    last_expert = tl.sum((is_expert & (ends - padded < first + BLOCK)).to(tl.int32), 0)
    own = first_expert
    while own < last_expert:
        start = tl.sum(tl.where(expert == own, ends - padded, 0), 0)
        received = tl.zeros((), dtype=tl.int64)
        for rank in range(NUM_RANKS):
            counts = tl.load(counts_ptr + rank * NUM_EXPERTS + expert, mask=is_expert, other=0).to(
                tl.int64
            )
            count = tl.sum(tl.where(expert == own, counts, 0), 0)
            before = received + tl.sum(tl.where(expert < own, counts, 0), 0)
            is_here = (row >= start) & (row < start + count)
            moved = before + (row - start)
            source = tl.where(is_here, moved, source)
            tl.store(position_ptr + moved, row, mask=is_here)
            start += count
            received += tl.sum(counts, 0)
        own += 1

    tl.store(source_ptr + row, source, mask=row < max_rows)
    # Received rows beyond all counts: no other program writes them.
    tl.store(
        position_ptr + row,
        tl.full((BLOCK,), -1, tl.int64),
        mask=(row >= tl.sum(totals, 0)) & (row < num_rows),
    )
