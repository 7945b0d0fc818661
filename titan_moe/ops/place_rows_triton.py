"""The Triton kernels that sort choices by expert and copy tokens to ranks: two launches each.

Both are a stable counting sort of T tokens' K choices into bins, experts or ranks. The first kernel
counts each block of tokens; in the second each block adds up for itself what lies before it. All
sums are of whole numbers and in order: no atomics, and no wait for the device.
"""

import triton
import triton.language as tl
from torch import Tensor, int32, int64

_TOKENS = 128
"""Of a program."""
_TILE, _TILE_OF_COPIES = 2048, 256
"""Elements of [tokens, bins] that a program holds at a time: with more, sm_90 spills; where ranks
are bins, with 1024 at 8 choices and 64 ranks, and with 512 at 8 choices and 8 ranks."""


def count_experts(experts_TK: Tensor, num_experts: int) -> Tensor:
    """As permute_indices.count_experts."""
    counts_BE = _counted(experts_TK.contiguous(), num_local=1, num_bins=num_experts, once=False)
    return counts_BE.sum(0, dtype=int64)


def sort_by_expert(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As permute_indices.sort_by_expert: the token and the slot of each row, and rows_TK."""
    experts_TK = experts_TK.contiguous()
    num_tokens, top_k = experts_TK.shape
    counts_BE = _counted(experts_TK, num_local=1, num_bins=num_experts, once=False)
    token_N = experts_TK.new_empty(experts_TK.numel())
    slot_N, rows_TK = (
        experts_TK.new_empty(experts_TK.numel()),
        experts_TK.new_empty(num_tokens, top_k),
    )
    if len(counts_BE):
        _sort_kernel[(len(counts_BE),)](
            experts_TK,
            counts_BE,
            token_N,
            slot_N,
            rows_TK,
            num_tokens,
            len(counts_BE),
            TOP_K=top_k,
            NUM_LOCAL=1,
            NUM_BINS=num_experts,
            **_tile(num_experts),
        )
    return token_N, slot_N, rows_TK


def count_copies(experts_TK: Tensor, num_local: int, num_ranks: int) -> Tensor:
    """As permute_indices.count_copies."""
    experts_TK = experts_TK.contiguous()
    return _counted(experts_TK, num_local=num_local, num_bins=num_ranks, once=True).sum(
        0, dtype=int64
    )


def place_copies(
    experts_TK: Tensor, order_TK: Tensor, num_local: int, num_ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As permute_indices.place_copies: source_R, rows_TK, and row_N."""
    experts_TK, order_TK = experts_TK.contiguous(), order_TK.contiguous()
    num_tokens, top_k = experts_TK.shape
    most = min(top_k, num_ranks)
    counts_BP = _counted(experts_TK, num_local=num_local, num_bins=num_ranks, once=True)
    source_R = experts_TK.new_empty(num_tokens * most)
    rows_TK = experts_TK.new_empty(num_tokens, most)
    row_N = experts_TK.new_empty(experts_TK.numel(), dtype=int32)
    if len(counts_BP):
        _copies_kernel[(len(counts_BP),)](
            experts_TK,
            order_TK,
            counts_BP,
            source_R,
            rows_TK,
            row_N,
            num_tokens,
            len(counts_BP),
            TOP_K=top_k,
            NUM_LOCAL=num_local,
            NUM_BINS=num_ranks,
            MOST=most,
            MOST_HERE=min(top_k, num_local),
            **_tile(num_ranks, _TILE_OF_COPIES),
        )
    return source_R, rows_TK, row_N


def _counted(experts_TK: Tensor, *, num_local: int, num_bins: int, once: bool) -> Tensor:
    """int32 [blocks, bins]."""
    num_tokens, top_k = experts_TK.shape
    counts_BE = experts_TK.new_empty(triton.cdiv(num_tokens, _TOKENS), num_bins, dtype=int32)
    if len(counts_BE):
        _count_kernel[(len(counts_BE),)](
            experts_TK,
            counts_BE,
            num_tokens,
            TOP_K=top_k,
            NUM_LOCAL=num_local,
            NUM_BINS=num_bins,
            ONCE=once,
            **_tile(num_bins, _TILE_OF_COPIES if once else _TILE),
        )
    return counts_BE


def _tile(num_bins: int, size: int = _TILE) -> dict[str, int]:
    bins = triton.next_power_of_2(num_bins)
    return {"BINS": bins, "CHUNK": min(max(size // bins, 1), _TOKENS), "TOKENS": _TOKENS}


@triton.jit
def _hits(
    experts_ptr, token, num_tokens, TOP_K: tl.constexpr, NUM_LOCAL: tl.constexpr, bin_B
):  # fmt: skip
    """How many of each token's choices fall into each bin: [tokens, bins]."""
    hits = tl.zeros((token.shape[0], bin_B.shape[0]), dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + token * TOP_K + k, mask=token < num_tokens, other=-1)
        chosen = tl.where(expert < 0, -1, expert // NUM_LOCAL)
        hits += (chosen[:, None] == bin_B[None, :]).to(tl.int32)
    return hits


@triton.jit
def _before(counts_ptr, num_blocks, NUM_BINS: tl.constexpr, bin_B, ROWS: tl.constexpr):
    """What this program's block begins with in each bin, and each bin's sum over all blocks."""
    block = tl.program_id(0)
    before = tl.zeros((bin_B.shape[0],), dtype=tl.int32)
    total = tl.zeros((bin_B.shape[0],), dtype=tl.int32)
    for first in range(0, num_blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < num_blocks)[:, None] & (bin_B < NUM_BINS)[None, :]
        place = row[:, None] * NUM_BINS + bin_B[None, :]
        counts = tl.load(counts_ptr + place, mask=inside, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((row < block)[:, None], counts, 0), 0)
    return before, total


@triton.jit(do_not_specialize=["num_tokens"])
def _count_kernel(
    experts_ptr,
    counts_ptr,
    num_tokens,
    TOP_K: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    NUM_BINS: tl.constexpr,
    ONCE: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    block = tl.program_id(0)
    bin_B = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for first in range(0, TOKENS, CHUNK):
        token = block * TOKENS + first + tl.arange(0, CHUNK)
        hits = _hits(experts_ptr, token, num_tokens, TOP_K, NUM_LOCAL, bin_B)
        if ONCE:
            hits = tl.minimum(hits, 1)
        counts += tl.sum(hits, 0)
    tl.store(counts_ptr + block * NUM_BINS + bin_B, counts, mask=bin_B < NUM_BINS)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _sort_kernel(
    experts_ptr,
    counts_ptr,
    token_ptr,
    slot_ptr,
    rows_ptr,
    num_tokens,
    num_blocks,
    TOP_K: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    bin_B = tl.arange(0, BINS)
    before, total = _before(counts_ptr, num_blocks, NUM_BINS, bin_B, CHUNK)
    start = tl.cumsum(total, 0) - total + before
    for first in range(0, TOKENS, CHUNK):
        token = tl.program_id(0) * TOKENS + first + tl.arange(0, CHUNK)
        is_token = token < num_tokens
        hits = _hits(experts_ptr, token, num_tokens, TOP_K, NUM_LOCAL, bin_B)
        place = start[None, :] + tl.cumsum(hits, 0) - hits
        for k in tl.static_range(TOP_K):
            expert = tl.load(experts_ptr + token * TOP_K + k, mask=is_token, other=-1)
            own = tl.sum(tl.where(expert[:, None] == bin_B[None, :], place, 0), 1)
            for other in tl.static_range(k):  # A choice made twice has two rows.
                earlier = tl.load(experts_ptr + token * TOP_K + other, mask=is_token, other=-1)
                own += (earlier == expert).to(tl.int32)
            slot = token * TOP_K + k
            tl.store(token_ptr + own, token.to(tl.int64), mask=is_token)
            tl.store(slot_ptr + own, slot.to(tl.int64), mask=is_token)
            tl.store(rows_ptr + slot, own.to(tl.int64), mask=is_token)
        start += tl.sum(hits, 0)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _copies_kernel(
    experts_ptr,
    order_ptr,
    counts_ptr,
    source_ptr,
    rows_ptr,
    row_ptr,
    num_tokens,
    num_blocks,
    TOP_K: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    NUM_BINS: tl.constexpr,
    MOST: tl.constexpr,
    MOST_HERE: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    bin_B = tl.arange(0, BINS)
    before, total = _before(counts_ptr, num_blocks, NUM_BINS, bin_B, CHUNK)
    start = tl.cumsum(total, 0) - total
    for first in range(0, TOKENS, CHUNK):
        token = tl.program_id(0) * TOKENS + first + tl.arange(0, CHUNK)
        is_token = token < num_tokens
        hits = _hits(experts_ptr, token, num_tokens, TOP_K, NUM_LOCAL, bin_B)
        hits = tl.minimum(hits, 1)
        row = before[None, :] + tl.cumsum(hits, 0) - hits
        place = start[None, :] + row
        nth = tl.cumsum(hits, 1) - hits
        source = tl.zeros((CHUNK, BINS), dtype=tl.int64) + token[:, None]
        tl.store(source_ptr + place, source, mask=hits > 0)
        to = token[:, None] * MOST + nth
        tl.store(rows_ptr + to, place.to(tl.int64), mask=hits > 0)
        reached = tl.sum(hits, 1)
        for j in tl.static_range(MOST):
            none = tl.full((CHUNK,), -1, dtype=tl.int64)
            tl.store(rows_ptr + token * MOST + j, none, mask=is_token & (reached <= j))
        for k in tl.static_range(TOP_K):
            expert = tl.load(experts_ptr + token * TOP_K + k, mask=is_token, other=0)
            rank = expert // NUM_LOCAL
            own = tl.sum(tl.where(rank[:, None] == bin_B[None, :], row, 0), 1) * MOST_HERE
            for other in tl.static_range(k):
                earlier = tl.load(experts_ptr + token * TOP_K + other, mask=is_token, other=0)
                own += (earlier // NUM_LOCAL == rank).to(tl.int32)
            order = tl.load(order_ptr + token * TOP_K + k, mask=is_token, other=0)
            tl.store(row_ptr + order, own, mask=is_token)
        before += tl.sum(hits, 0)
