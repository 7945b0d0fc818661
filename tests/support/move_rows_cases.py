"""Cases for move_rows, and slow loops to compare with."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from titan_moe.ops import move_rows

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
# (tokens, experts per token, D): narrow, odd, wider than a tile, none at all.
SIZES = [(5, 1, 1), (300, 2, 1), (7, 3, 5), (33, 8, 96), (3, 2, 2500), (0, 2, 8)]


def cases() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x_TD, source_R with padding in it, rows_TK, with -1 in half the cases. Small integers: sums
    are exact."""
    generator = torch.Generator().manual_seed(0)
    for (num_tokens, top_k, dim), lacks_some in product(SIZES, (False, True)):
        slots = torch.randperm(num_tokens * top_k, generator=generator)
        source_R = torch.full((2 * len(slots) + 3,), -1)
        rows = torch.randperm(len(source_R), generator=generator)[: len(slots)]
        source_R[rows] = slots // max(top_k, 1)
        rows_TK = torch.empty_like(rows)
        rows_TK[slots] = rows
        if lacks_some:
            lacking = torch.rand(len(slots), generator=generator) < 0.4
            source_R[rows_TK[lacking]] = -1
            rows_TK[lacking] = -1
        x_TD = torch.randint(-8, 8, (num_tokens, dim), generator=generator)
        yield x_TD, source_R, rows_TK.view(num_tokens, top_k)


def check(dtype: torch.dtype, device: str = "cpu") -> None:
    """Checks copies and sums against loops over rows."""
    for numbers_TD, source_R, rows_TK in cases():
        x_TD = numbers_TD.to(dtype) * (1 + 2**-40)  # Exact in float64, and 1 in narrower types.
        x_TD[::7, :1], x_TD[1::7, -1:] = torch.nan, torch.inf
        expected_RD = torch.zeros(len(source_R), x_TD.shape[1], dtype=dtype)
        for row, source in enumerate(source_R.tolist()):
            if source >= 0:
                expected_RD[row] = x_TD[source]
        x_RD = move_rows.copy_rows(x_TD.to(device), source_R.to(device))
        _assert_equal(x_RD, expected_RD)

        y_RD = x_RD.cpu() + torch.arange(len(x_RD))[:, None].remainder(5).to(dtype)
        y_RD[source_R < 0] = torch.nan
        expected_TD = torch.zeros_like(x_TD)
        for token, rows in enumerate(rows_TK.tolist()):
            for row in rows:
                if row >= 0:
                    expected_TD[token] += y_RD[row]
        y_TD = move_rows.add_rows(y_RD.to(device), rows_TK.to(device))
        _assert_equal(y_TD, expected_TD)
        whole_RD, part_RD = y_RD + 2.0, torch.full_like(y_RD, 2.0)
        both_TD = move_rows.add_rows(y_RD.to(device), rows_TK.to(device), part_RD.to(device))
        _assert_equal(both_TD, move_rows.add_rows_reference(whole_RD, rows_TK))

        one_1D = torch.arange(x_TD.shape[1])[None].remainder(7).to(dtype)
        spread_RD = one_1D.to(device).expand(len(y_RD), -1)  # A gradient may be of this kind.
        total_TD = move_rows.add_rows(spread_RD, rows_TK.to(device)).cpu()
        assert torch.equal(total_TD, (rows_TK >= 0).sum(1, keepdim=True).to(dtype) * one_1D)


def check_kernels(device: str) -> None:
    for dtype in DTYPES:
        check(dtype, device)


def _assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
