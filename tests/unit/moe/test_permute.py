"""Gathers there and back against slow loops."""

import torch

from titan_moe.moe.permute import combine_rows, gather_rows, invert


def _maps(num_tokens: int, top_k: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random assignment of T*K slots to rows with padding rows in between."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_rows = num_tokens * top_k + padding
    rows_TK = torch.randperm(num_rows, generator=generator)[: num_tokens * top_k]
    rows_TK = rows_TK.view(num_tokens, top_k)
    source_R = torch.full((num_rows,), -1)
    for token in range(num_tokens):
        source_R[rows_TK[token]] = token
    return rows_TK, source_R


def test_gather_and_combine_match_loops_forward_and_backward():
    for num_tokens, top_k, padding in [(5, 3, 4), (1, 1, 0), (7, 2, 0), (4, 1, 9)]:
        rows_TK, source_R = _maps(num_tokens, top_k, padding)
        x_TD = torch.randn(num_tokens, 6, dtype=torch.float64, requires_grad=True)
        y_RD = torch.randn(len(source_R), 6, dtype=torch.float64, requires_grad=True)

        gathered = gather_rows(x_TD, source_R, rows_TK)
        combined = combine_rows(y_RD, rows_TK, source_R)

        for row, token in enumerate(source_R.tolist()):
            expected = x_TD[token] if token >= 0 else torch.zeros(6, dtype=torch.float64)
            assert torch.equal(gathered[row], expected)
        for token, rows in enumerate(rows_TK.tolist()):
            torch.testing.assert_close(combined[token], sum(y_RD[row] for row in rows))
        assert torch.autograd.gradcheck(lambda x: gather_rows(x, source_R, rows_TK), x_TD)  # noqa: B023
        assert torch.autograd.gradcheck(lambda y: combine_rows(y, rows_TK, source_R), y_RD)  # noqa: B023


def test_values_in_padding_rows_never_reach_tokens():
    rows_TK, source_R = _maps(5, 2, 6)
    y_RD = torch.randn(len(source_R), 3)
    y_RD[source_R < 0] = float("nan")
    y_RD.requires_grad_()
    combined = combine_rows(y_RD, rows_TK, source_R)
    combined.sum().backward()
    assert combined.isfinite().all()
    assert torch.equal(y_RD.grad[source_R < 0], torch.zeros(6, 3))

    x_TD = torch.randn(5, 3, requires_grad=True)
    poison = torch.ones(len(source_R), 3)
    poison[source_R < 0] = float("nan")
    gather_rows(x_TD, source_R, rows_TK).backward(poison)
    assert x_TD.grad.isfinite().all()


def test_invert():
    order = torch.randperm(50)
    assert torch.equal(order[invert(order)], torch.arange(50))
