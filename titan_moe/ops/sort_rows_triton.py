"""The Triton kernels that order choices by expert and copies of tokens by rank.

Both orders are stable counting sorts in two launches, without atomics: programs count the keys of
their tokens; then each adds up the counts before its own, which lie in the cache, and writes where
its rows go. The key of a choice is its expert, or its expert's rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHOICES_OF_A_PROGRAM = 1024
# Elements of the largest tile, which compares choices with keys or adds up counts.
_TILE = 4096


def sort_by_expert(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the results of `permute_indices.sort_by_expert_reference`."""
    token_N, slot_N = (experts_TK.new_empty(experts_TK.numel()) for _ in range(2))
    rows_TK = experts_TK.new_empty(experts_TK.shape)
    counts_E = _order(experts_TK, num_experts, token_N, slot_N, rows_TK)
    return token_N, slot_N, rows_TK, counts_E


def copies_to_ranks(
    experts_TK: Tensor, num_local: int, num_ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the results of `permute_indices.copies_to_ranks`."""
    num_tokens, most = len(experts_TK), min(experts_TK.shape[1], num_ranks)
    source_R = experts_TK.new_empty(num_tokens * most)
    rows_TM = experts_TK.new_empty(num_tokens, most)
    slots_TK = experts_TK.new_empty(experts_TK.shape, dtype=torch.int32)
    key = {"DIVISOR": num_local, "ONCE": 1}
    counts_P = _order(experts_TK, num_ranks, source_R, slots_TK, rows_TM, **key)
    return source_R, rows_TM, slots_TK, counts_P


def _order(experts_TK: Tensor, num_keys: int, *results: Tensor, **key: int) -> Tensor:
    """Fills the results, the last of which is rows_TM; returns how often each key counts."""
    experts_TK, constants = experts_TK.contiguous(), sizes(experts_TK, num_keys, **key)
    counts_NP, totals_P = _count(experts_TK, constants), experts_TK.new_empty(num_keys)
    numbers = len(experts_TK), len(counts_NP)
    constants |= {"NUM_KEYS": num_keys, "MOST": results[-1].shape[1]}
    constants["PROGRAMS"] = max(_TILE // constants["KEYS"], 1)
    _order_kernel[numbers[1:]](experts_TK, counts_NP, *results, totals_P, *numbers, **constants)
    return totals_P


def _count(experts_TK: Tensor, constants: dict[str, int]) -> Tensor:
    """Returns each program's counts of keys, int32."""
    tokens = constants["TOKENS"] * constants["CHUNKS"]
    # At least one: a program must write that there is nothing.
    programs = max(triton.cdiv(len(experts_TK), tokens), 1)
    counts = experts_TK.new_empty(programs, constants["KEYS"], dtype=torch.int32)
    _count_kernel[(programs,)](experts_TK, counts, len(experts_TK), **constants)
    return counts


def sizes(experts_TK: Tensor, num_keys: int, DIVISOR: int = 1, ONCE: int = 0) -> dict[str, int]:
    """Returns the constants of both kernels."""
    top_k = experts_TK.shape[1]
    keys, choices = triton.next_power_of_2(num_keys), triton.next_power_of_2(top_k)
    tokens = max(min(32, _TILE // keys) // choices, 1)
    chunks = max(_CHOICES_OF_A_PROGRAM // (tokens * choices), 1)
    own = {"KEYS": keys, "CHOICES": choices, "TOKENS": tokens, "CHUNKS": chunks}
    return {"TOP_K": top_k, "DIVISOR": DIVISOR, "ONCE": ONCE, **own}


@triton.jit
def _choices(
    experts_ptr, first, num_tokens, TOP_K: tl.constexpr, DIVISOR: tl.constexpr, ONCE: tl.constexpr,
    TOKENS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Returns, for some tokens' choices, slots, keys, which exist and which count: each [T, K].

    With ONCE only the first of a token's choices with the same key counts.
    """
    token = first + tl.arange(0, TOKENS)
    k = tl.arange(0, CHOICES)
    slot = token[:, None] * TOP_K + k[None, :]
    exists = (token < num_tokens)[:, None] & (k < TOP_K)[None, :]
    key = tl.load(experts_ptr + slot, mask=exists, other=0).to(tl.int32) // DIVISOR
    key = tl.where(exists, key, -1)
    counts = exists
    if ONCE:
        repeats = (key[:, :, None] == key[:, None, :]) & (k[None, None, :] < k[None, :, None])
        counts = exists & (tl.sum(repeats.to(tl.int32), 2) == 0)
    return slot, key, exists, counts


@triton.jit(do_not_specialize=["num_tokens"])
def _count_kernel(
    experts_ptr, counts_ptr, num_tokens, TOP_K: tl.constexpr, DIVISOR: tl.constexpr,
    ONCE: tl.constexpr, KEYS: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    keys = tl.arange(0, KEYS)
    totals = tl.zeros((KEYS,), dtype=tl.int32)
    for chunk in range(CHUNKS):
        first = (tl.program_id(0) * CHUNKS + chunk) * TOKENS
        _, key, _, counts = _choices(
            experts_ptr, first, num_tokens, TOP_K, DIVISOR, ONCE, TOKENS, CHOICES
        )
        counted = tl.reshape(tl.where(counts, key, -1), (TOKENS * CHOICES,))
        totals += tl.sum((counted[:, None] == keys[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + tl.program_id(0) * KEYS + keys, totals)


@triton.jit(do_not_specialize=["num_tokens", "num_programs"])
def _order_kernel(
    experts_ptr, counts_ptr, source_ptr, slots_ptr, rows_ptr, totals_ptr, num_tokens, num_programs,
    NUM_KEYS: tl.constexpr, MOST: tl.constexpr, TOP_K: tl.constexpr, DIVISOR: tl.constexpr,
    ONCE: tl.constexpr, KEYS: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    keys = tl.arange(0, KEYS)
    totals = tl.zeros((KEYS,), dtype=tl.int32)
    before = tl.zeros((KEYS,), dtype=tl.int32)  # Of each key, in tokens before the chunk.
    first_program = 0
    # Not a range: Triton 3.6 interprets none whose end is an argument, with numpy 2.4.
    while first_program < num_programs:
        program = first_program + tl.arange(0, PROGRAMS)
        place = counts_ptr + program[:, None] * KEYS + keys[None, :]
        counted = tl.load(place, mask=(program < num_programs)[:, None], other=0)
        totals += tl.sum(counted, 0)
        before += tl.sum(tl.where((program < tl.program_id(0))[:, None], counted, 0), 0)
        first_program += PROGRAMS
    if tl.program_id(0) == 0:
        tl.store(totals_ptr + keys, totals.to(tl.int64), mask=keys < NUM_KEYS)
    starts = tl.cumsum(totals, 0) - totals
    k = tl.arange(0, CHOICES)
    order = tl.arange(0, TOKENS * CHOICES)
    if ONCE:
        order = order // CHOICES  # A token's choices of one key share a place.
    for chunk in range(CHUNKS):
        first = (tl.program_id(0) * CHUNKS + chunk) * TOKENS
        slot, key, exists, counts = _choices(
            experts_ptr, first, num_tokens, TOP_K, DIVISOR, ONCE, TOKENS, CHOICES
        )
        token = slot // TOP_K
        flat = tl.reshape(key, (TOKENS * CHOICES,))
        flat_counted = tl.reshape(tl.where(counts, key, -2), (TOKENS * CHOICES,))
        is_key = flat[:, None] == keys[None, :]
        is_earlier = (flat[:, None] == flat_counted[None, :]) & (order[None, :] < order[:, None])
        nth = tl.sum(is_earlier.to(tl.int32), 1)  # Of its key.
        nth += tl.sum(tl.where(is_key, before[None, :], 0), 1)
        start = tl.sum(tl.where(is_key, starts[None, :], 0), 1)
        before += tl.sum((flat_counted[:, None] == keys[None, :]).to(tl.int32), 0)
        place = tl.reshape(start + nth, (TOKENS, CHOICES))
        tl.store(source_ptr + place, token.to(tl.int64), mask=counts)
        if ONCE:
            row = tl.reshape(nth, (TOKENS, CHOICES))
            tl.store(slots_ptr + slot, row * TOP_K + k[None, :], mask=exists)
            # A token's copies by rank, then -1: each choice has a column of its own.
            number = tl.where(counts, key, KEYS + k[None, :])
            is_less = exists[:, None, :] & (number[:, None, :] < number[:, :, None])
            column = tl.sum(is_less.to(tl.int32), 2)
            copy = tl.where(counts, place, -1).to(tl.int64)
            tl.store(rows_ptr + token * MOST + column, copy, mask=exists & (column < MOST))
            # Behind the last copy: no other program writes there.
            behind = token * MOST + k[None, :]
            is_behind = exists & (k < MOST)[None, :] & (behind >= tl.sum(totals, 0))
            tl.store(source_ptr + behind, tl.full((TOKENS, CHOICES), -1, tl.int64), mask=is_behind)
        else:
            tl.store(rows_ptr + slot, place.to(tl.int64), mask=exists)
            tl.store(slots_ptr + place, slot.to(tl.int64), mask=exists)
