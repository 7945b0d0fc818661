"""Cases and slow loops for the tests of permute_indices: index maps, sorting and copying."""

from collections.abc import Iterator

import torch
from torch import Tensor

from titan_moe.ops.permute_indices import (
    PermuteIndices,
    copies_to_ranks,
    copy_to_ranks,
    count_experts,
    max_padded_rows,
    permute_indices,
    reached_ranks,
    sort_by_expert,
)

ALIGNMENTS = (1, 8, 16, 32, 128)


def slow_indices(
    counts: list[list[int]], num_rows: int, row_alignment: int, max_rows: int
) -> dict[str, list[int]]:
    """permute_indices as a person would do it by hand, one row at a time."""
    arrived_of: dict[tuple[int, int], list[int]] = {}
    next_row = 0
    for rank, row_counts in enumerate(counts):
        for expert, count in enumerate(row_counts):
            arrived_of[rank, expert] = list(range(next_row, next_row + count))
            next_row += count
    source: list[int] = []
    offsets = []
    for expert in range(len(counts[0])):
        rows = [row for rank in range(len(counts)) for row in arrived_of[rank, expert]]
        while len(rows) % row_alignment or (not rows and row_alignment > 1):
            rows.append(-1)
        source += rows
        offsets.append(len(source))
    position = [source.index(row) if row < next_row else -1 for row in range(num_rows)]
    source += [-1] * (max_rows - len(source))
    return {"source": source, "position": position, "offsets": offsets}


def cases() -> Iterator[tuple[list[list[int]], int]]:
    """(counts, unused rows at the end of the arrived buffer): the corners, then random ones."""
    yield [[5, 3, 0, 7]], 0  # one rank
    yield [[0, 0, 0, 0], [0, 0, 0, 0]], 0  # no tokens at all
    yield [[0, 0, 0], [0, 0, 0]], 3
    yield [[0, 0, 1, 0], [0, 0, 0, 0]], 0  # one token
    yield [[0, 700, 0], [0, 0, 0], [0, 421, 0]], 0  # every token on one expert, over several blocks
    yield [[0, 0, 9], [0, 0, 11]], 2  # on the last expert
    yield [[13]], 0  # one expert
    yield (
        [[1, 0, 0, 40, 2], [0, 0, 0, 0, 0], [300, 1, 0, 0, 5]],
        7,
    )  # uneven ranks, one of them idle
    generator = torch.Generator().manual_seed(0)

    def draw(high: int) -> int:
        return int(torch.randint(0, high, (), generator=generator))

    for _ in range(12):
        num_ranks, num_experts = 1 + draw(6), 1 + draw(9)
        most = (2, 10, 60)[draw(3)]
        # About half of the counts are 0.
        yield (
            [[max(0, draw(2 * most) - most) for _ in range(num_experts)] for _ in range(num_ranks)],
            draw(5),
        )


def check(counts: list[list[int]], unused: int, row_alignment: int, *, device: str = "cpu") -> None:
    """Compare permute_indices with the slow loop, exactly."""
    num_rows = sum(map(sum, counts)) + unused
    max_rows = max_padded_rows(num_rows, len(counts[0]), row_alignment)
    dtype = torch.int32 if unused % 2 else torch.int64
    counts_PE = torch.tensor(counts, dtype=dtype, device=device)
    indices = permute_indices(counts_PE, num_rows, row_alignment)
    assert as_lists(indices) == slow_indices(counts, num_rows, row_alignment, max_rows)
    assert max_rows % row_alignment == 0


def as_lists(indices: PermuteIndices) -> dict[str, list[int]]:
    """The three tensors as lists, once their types are right."""
    tensors: dict[str, Tensor] = {
        "source": indices.source_R,
        "position": indices.position_R,
        "offsets": indices.offsets_E,
    }
    assert [t.dtype for t in tensors.values()] == [torch.int64, torch.int64, torch.int32]
    return {name: tensor.tolist() for name, tensor in tensors.items()}


# (tokens, K, experts, experts of a rank): one of each, odd numbers, many tokens, many ranks.
_SIZES = [
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
    for num_tokens, top_k, num_experts, num_local in _SIZES:
        scores = torch.rand(num_tokens, num_experts, generator=drawn)
        yield scores.topk(top_k).indices, num_experts, num_local
    # All tokens alike; and a choice made twice has two rows.
    yield torch.tensor([[5, 4]]).repeat(131, 1), 6, 2
    yield torch.tensor([[1, 1], [0, 1], [1, 0]]), 2, 2


def check_choices(device: str = "cpu") -> int:
    """Compares counts, sort and copies with loops, exactly; returns the number of cases."""
    cases = list(expert_choices())
    for experts_TK, num_experts, num_local in cases:
        on_device, num_ranks = experts_TK.to(device), num_experts // num_local
        choices = experts_TK.tolist()
        order = sorted(
            (expert, token, k) for token, row in enumerate(choices) for k, expert in enumerate(row)
        )
        counts_E = count_experts(on_device, num_experts)
        chosen = [expert for row in choices for expert in row]
        assert counts_E.tolist() == [chosen.count(expert) for expert in range(num_experts)]

        tokens, slots = sort_by_expert(on_device, num_experts)
        top_k = experts_TK.shape[1]
        assert tokens.source_R.tolist() == [token for _, token, _ in order]
        assert slots.source_R.tolist() == [token * top_k + k for _, token, k in order]
        place = {(token, k): n for n, (_, token, k) in enumerate(order)}
        order_TK = [[place[token, k] for k in range(top_k)] for token in range(len(choices))]
        assert tokens.rows_TK.tolist() == order_TK
        assert slots.rows_TK.flatten().tolist() == [n for row in order_TK for n in row]
        _check_copies(on_device, choices, num_local, num_ranks)
    return len(cases)


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
