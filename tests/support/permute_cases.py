"""Cases of permute_indices, and a slow loop to compare with."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from titan_moe.ops.permute_indices import PermuteIndices, max_padded_rows, permute_indices

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


def check_kernels(device: str) -> None:
    for (counts, unused), row_alignment in product(cases(), ALIGNMENTS):
        check(counts, unused, row_alignment, device=device)
