"""Gathers there and back against slow loops."""

import pytest
import torch

from titan_moe.ops.move_rows import RowMap, combine_rows, gather_rows
from titan_moe.ops.permute_indices import copy_to_ranks


def _maps(num_tokens: int, top_k: int, padding: int) -> RowMap:
    """A random assignment of T*K slots to rows with padding rows in between."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_rows = num_tokens * top_k + padding
    rows_TK = torch.randperm(num_rows, generator=generator)[: num_tokens * top_k]
    rows_TK = rows_TK.view(num_tokens, top_k)
    source_R = torch.full((num_rows,), -1)
    for token in range(num_tokens):
        source_R[rows_TK[token]] = token
    return RowMap(source_R, rows_TK)


def test_gather_and_combine_match_loops_forward_and_backward():
    for num_tokens, top_k, padding in [(5, 3, 4), (1, 1, 0), (7, 2, 0), (4, 1, 9)]:
        source_R, rows_TK = maps = _maps(num_tokens, top_k, padding)
        x_TD = torch.randn(num_tokens, 6, dtype=torch.float64, requires_grad=True)
        y_RD = torch.randn(len(source_R), 6, dtype=torch.float64, requires_grad=True)

        gathered = gather_rows(x_TD, maps)
        combined = combine_rows(y_RD, maps)

        for row, token in enumerate(source_R.tolist()):
            expected = x_TD[token] if token >= 0 else torch.zeros(6, dtype=torch.float64)
            assert torch.equal(gathered[row], expected)
        for token, rows in enumerate(rows_TK.tolist()):
            torch.testing.assert_close(combined[token], sum(y_RD[row] for row in rows))
        assert torch.autograd.gradcheck(lambda x: gather_rows(x, maps), x_TD)  # noqa: B023
        assert torch.autograd.gradcheck(lambda y: combine_rows(y, maps), y_RD)  # noqa: B023


def test_values_in_padding_rows_never_reach_tokens():
    source_R, _ = maps = _maps(5, 2, 6)
    y_RD = torch.randn(len(source_R), 3)
    y_RD[source_R < 0] = float("nan")
    y_RD.requires_grad_()
    combined = combine_rows(y_RD, maps)
    combined.sum().backward()
    assert combined.isfinite().all()
    assert torch.equal(y_RD.grad[source_R < 0], torch.zeros(6, 3))

    x_TD = torch.randn(5, 3, requires_grad=True)
    poison = torch.ones(len(source_R), 3)
    poison[source_R < 0] = float("nan")
    gather_rows(x_TD, maps).backward(poison)
    assert x_TD.grad.isfinite().all()


def _reached(num_rows: int, degree: int, most: int, seed: int) -> torch.Tensor:
    """Each row reaches 1 to `most` ranks; none the last rank."""
    drawn = torch.Generator().manual_seed(seed)
    reached_MP = torch.zeros(num_rows, degree, dtype=torch.bool)
    for row in range(num_rows):
        count = int(torch.randint(1, most + 1, (), generator=drawn))
        reached_MP[row, torch.randperm(degree - 1, generator=drawn)[:count]] = True
    return reached_MP


def _copies(reached_MP: torch.Tensor, most: int) -> RowMap:
    copies = copy_to_ranks(reached_MP, most)
    return copies._replace(source_R=copies.source_R[: int(reached_MP.sum())])


@pytest.mark.parametrize("num_rows, degree, most", [(9, 5, 3), (1, 2, 1), (30, 9, 4), (0, 3, 2)])
def test_copies_and_sums_match_loops_forward_and_backward(num_rows: int, degree: int, most: int):
    reached_MP = _reached(num_rows, degree, most, seed=num_rows)
    copies = _copies(reached_MP, most)
    expected = [m for p in range(degree) for m in range(num_rows) if reached_MP[m, p]]
    assert copies.source_R.tolist() == expected
    x_MD = torch.randn(num_rows, 4, dtype=torch.float64, requires_grad=True)
    y_RD = torch.randn(len(expected), 4, dtype=torch.float64, requires_grad=True)
    assert torch.equal(gather_rows(x_MD, copies), x_MD[expected])
    sums_MD = torch.zeros(num_rows, 4, dtype=torch.float64)
    for place, row in enumerate(expected):
        sums_MD[row] += y_RD[place].detach()
    torch.testing.assert_close(combine_rows(y_RD, copies), sums_MD)
    if num_rows:
        assert torch.autograd.gradcheck(lambda x: gather_rows(x, copies), x_MD)
        assert torch.autograd.gradcheck(lambda y: combine_rows(y, copies), y_RD)
