"""Choices of experts, and slow loops that count, sort and copy them, to compare with."""

from collections.abc import Iterator

import torch
from torch import Tensor

from titan_moe.ops.permute_indices import (
    copies_to_ranks,
    copy_to_ranks,
    reached_ranks,
    sort_by_expert,
)

# (tokens, K, experts, experts of a rank): one of each, odd numbers, many tokens, many ranks.
SIZES = [
    (0, 2, 4, 2),
    (1, 1, 1, 1),
    (5, 3, 8, 2),
    (130, 2, 6, 3),
    (270, 4, 12, 1),
    (20, 2, 300, 25),
]


def expert_choices() -> Iterator[tuple[Tensor, int, int]]:
    """Yields experts_TK, num_experts, num_local."""
    drawn = torch.Generator().manual_seed(0)
    for num_tokens, top_k, num_experts, num_local in SIZES:
        scores = torch.rand(num_tokens, num_experts, generator=drawn)
        yield scores.topk(top_k).indices, num_experts, num_local
    # All tokens alike; and a choice made twice has two rows.
    yield torch.tensor([[5, 4]]).repeat(131, 1), 6, 2
    yield torch.tensor([[1, 1], [0, 1], [1, 0]]), 2, 2


def check_kernels(device: str) -> None:
    """Compares counts, sort and copies with loops, exactly."""
    for experts_TK, num_experts, num_local in expert_choices():
        on_device, num_ranks = experts_TK.to(device), num_experts // num_local
        choices = experts_TK.tolist()
        order = sorted(
            (expert, token, k) for token, row in enumerate(choices) for k, expert in enumerate(row)
        )
        chosen = [expert for row in choices for expert in row]
        tokens, slots, counts_E = sort_by_expert(on_device, num_experts)
        assert counts_E.tolist() == [chosen.count(expert) for expert in range(num_experts)]
        top_k = experts_TK.shape[1]
        assert tokens.source_R.tolist() == [token for _, token, _ in order]
        assert slots.source_R.tolist() == [token * top_k + k for _, token, k in order]
        place = {(token, k): n for n, (_, token, k) in enumerate(order)}
        order_TK = [[place[token, k] for k in range(top_k)] for token in range(len(choices))]
        assert tokens.rows_TK.tolist() == order_TK
        assert slots.rows_TK.flatten().tolist() == [n for row in order_TK for n in row]
        _check_copies(on_device, choices, num_local, num_ranks)


def _check_copies(
    experts_TK: Tensor, choices: list[list[int]], num_local: int, num_ranks: int
) -> None:
    sent = [
        [t for t, row in enumerate(choices) if any(e // num_local == rank for e in row)]
        for rank in range(num_ranks)
    ]
    copies = [(rank, token) for rank, tokens in enumerate(sent) for token in tokens]
    reached_TP = reached_ranks(experts_TK, num_local, num_ranks)
    assert reached_TP.sum(0).tolist() == [len(tokens) for tokens in sent]
    top_k = experts_TK.shape[1]
    most = min(top_k, num_ranks)
    source_R, rows_TK, slots_TK, counts_P = copies_to_ranks(experts_TK, num_local, num_ranks)
    again = copy_to_ranks(reached_TP, most)
    assert torch.equal(source_R, again.source_R) and torch.equal(rows_TK, again.rows_TK)
    assert counts_P.tolist() == [len(tokens) for tokens in sent]
    assert source_R[: len(copies)].tolist() == [token for _, token in copies]
    assert rows_TK.shape == (len(choices), most) and len(source_R) == len(choices) * most
    assert slots_TK.dtype == torch.int32
    for token, row in enumerate(choices):
        places = [n for n, (_, copied) in enumerate(copies) if copied == token]
        assert rows_TK[token].tolist() == places + [-1] * (most - len(places))
        for k, expert in enumerate(row):
            row_there = sent[expert // num_local].index(token)
            assert slots_TK[token, k] == row_there * top_k + k
