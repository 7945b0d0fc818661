"""Copies to ranks, and their sums, against slow loops."""

import pytest
import torch

from titan_moe.ops.move_rows import combine_rows, copy_rows, gathered_rows
from titan_moe.ops.permute_indices import copy_to_ranks


def _reached(num_rows: int, degree: int, most: int, seed: int) -> torch.Tensor:
    """Each row reaches 1 to `most` ranks; none the last rank."""
    drawn = torch.Generator().manual_seed(seed)
    reached_MP = torch.zeros(num_rows, degree, dtype=torch.bool)
    for row in range(num_rows):
        count = int(torch.randint(1, most + 1, (), generator=drawn))
        reached_MP[row, torch.randperm(degree - 1, generator=drawn)[:count]] = True
    return reached_MP


@pytest.mark.parametrize("num_rows, degree, most", [(9, 5, 3), (1, 2, 1), (30, 9, 4), (0, 3, 2)])
def test_copies_and_sums_match_loops_forward_and_backward(num_rows: int, degree: int, most: int):
    reached_MP = _reached(num_rows, degree, most, seed=num_rows)
    copies = copy_to_ranks(reached_MP, most)
    expected = [m for p in range(degree) for m in range(num_rows) if reached_MP[m, p]]
    unused = [-1] * (num_rows * most - len(expected))
    assert copies.source_R.tolist() == expected + unused

    def sent_of(x_MD: torch.Tensor) -> torch.Tensor:
        copied = copy_rows(x_MD.detach(), copies.source_R)
        return gathered_rows(x_MD, copied[: len(expected)], copies)

    x_MD = torch.randn(num_rows, 4, dtype=torch.float64, requires_grad=True)
    y_RD = torch.randn(len(expected), 4, dtype=torch.float64, requires_grad=True)
    assert torch.equal(sent_of(x_MD), x_MD[expected])
    sums_MD = torch.zeros(num_rows, 4, dtype=torch.float64)
    for place, row in enumerate(expected):
        sums_MD[row] += y_RD[place].detach()
    torch.testing.assert_close(combine_rows(y_RD, copies), sums_MD)
    if num_rows:
        assert torch.autograd.gradcheck(sent_of, x_MD)
        assert torch.autograd.gradcheck(lambda y: combine_rows(y, copies), y_RD)
