"""Rows with varying numbers of copies against slow loops."""

import pytest
import torch

from titan_moe.moe.ragged import (
    Copies,
    add_present,
    add_ragged,
    copy_present,
    copy_ragged,
    spread,
    starts,
)


def _reached(num_rows: int, degree: int, most: int, seed: int) -> torch.Tensor:
    """Each row reaches 1 to `most` ranks; nobody the last rank."""
    drawn = torch.Generator().manual_seed(seed)
    reached_MP = torch.zeros(num_rows, degree, dtype=torch.bool)
    for row in range(num_rows):
        count = int(torch.randint(1, most + 1, (), generator=drawn))
        reached_MP[row, torch.randperm(degree - 1, generator=drawn)[:count]] = True
    return reached_MP


def _copies(reached_MP: torch.Tensor, most: int) -> Copies:
    drafted = spread(reached_MP, most)
    assert drafted.sent_P.tolist() == reached_MP.sum(0).tolist()
    return drafted.copies(drafted.sizes_I.tolist())


@pytest.mark.parametrize("num_rows, degree, most", [(9, 5, 3), (1, 2, 1), (30, 9, 4), (0, 3, 2)])
def test_copies_and_sums_match_loops_forward_and_backward(num_rows: int, degree: int, most: int):
    reached_MP = _reached(num_rows, degree, most, seed=num_rows)
    copies = _copies(reached_MP, most)
    expected = [m for p in range(degree) for m in range(num_rows) if reached_MP[m, p]]
    assert copies.source_R.tolist() == expected
    x_MD = torch.randn(num_rows, 4, dtype=torch.float64, requires_grad=True)
    y_RD = torch.randn(len(expected), 4, dtype=torch.float64, requires_grad=True)
    assert torch.equal(copy_ragged(x_MD, copies), x_MD[expected])
    sums_MD = torch.zeros(num_rows, 4, dtype=torch.float64)
    for place, row in enumerate(expected):
        sums_MD[row] += y_RD[place].detach()
    torch.testing.assert_close(add_ragged(y_RD, copies), sums_MD)
    if num_rows:
        assert torch.autograd.gradcheck(lambda x: copy_ragged(x, copies), x_MD)
        assert torch.autograd.gradcheck(lambda y: add_ragged(y, copies), y_RD)


def test_padding_is_zeros_and_never_read():
    copies = _copies(_reached(6, 4, 2, seed=1), 2)
    source_R = torch.cat([torch.tensor([-1]), copies.source_R, torch.tensor([-1, -1])])
    padded = copies._replace(source_R=source_R, place_N=copies.place_N + 1)
    x_RD = copy_ragged(torch.randn(6, 3), padded)
    assert not x_RD[source_R < 0].any() and x_RD[source_R >= 0].all()
    y_RD = torch.full((len(source_R), 3), torch.nan)
    y_RD[source_R >= 0] = 1.0
    y_RD.requires_grad_()
    sums_MD = add_ragged(y_RD, padded)
    assert torch.equal(sums_MD[:, 0], torch.bincount(copies.source_R).float())
    sums_MD.sum().backward()
    assert torch.equal(y_RD.grad[:, 0], (source_R >= 0).float())


def test_a_sum_of_narrow_numbers_is_rounded_once():
    reached_MP = torch.ones(1, 3, dtype=torch.bool)
    y_RD = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    # In bfloat16, 256 + 1 is 256.
    assert add_ragged(y_RD, _copies(reached_MP, 3)).item() == 258


def test_copies_that_were_not_made():
    rows_TK = torch.tensor([[2, -1], [0, 1], [-1, -1]])
    source_R = torch.tensor([1, 1, 0, -1])
    x_TD = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    y_RD = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    x_RD = copy_present(x_TD, source_R, rows_TK)
    assert torch.equal(x_RD[:3], x_TD[[1, 1, 0]]) and not x_RD[3].any()
    y_TD = add_present(y_RD, rows_TK, source_R)
    assert torch.equal(y_TD, torch.stack([y_RD[2], y_RD[0] + y_RD[1], torch.zeros(2)]))
    assert torch.autograd.gradcheck(lambda x: copy_present(x, source_R, rows_TK), x_TD)
    assert torch.autograd.gradcheck(lambda y: add_present(y, rows_TK, source_R), y_RD)


def test_starts():
    assert starts(torch.tensor([3, 0, 2])).tolist() == [0, 3, 3]
