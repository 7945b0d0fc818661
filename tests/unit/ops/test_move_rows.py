"""The order and the type of sums over a token's rows."""

import pytest
import torch

from tests.support.move_rows_cases import DTYPES
from titan_moe.ops.move_rows import add_rows


@pytest.mark.parametrize("lacks_some", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_token_are_added_in_order_and_rounded_once(
    dtype: torch.dtype, lacks_some: bool
) -> None:
    torch.manual_seed(0)
    y_RD = torch.randn(200, 33).to(dtype)
    rows_TK = torch.randperm(200).view(40, 5)
    if lacks_some:
        rows_TK[torch.rand(40, 5) < 0.3] = -1
    sums_TD = torch.zeros(40, 33, dtype=torch.promote_types(dtype, torch.float32))
    for rows_T in rows_TK.t():
        terms_TD = torch.where(rows_T[:, None] < 0, 0, y_RD[rows_T])
        sums_TD += terms_TD
    assert torch.equal(add_rows(y_RD, rows_TK), sums_TD.to(dtype))
