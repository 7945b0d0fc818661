"""Index maps against slow loops: copies to ranks, padded orders, and sums over a token's rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.move_rows_cases import DTYPES
from tests.support.operations import Operations
from tests.support.permute_cases import ALIGNMENTS, check
from titan_moe.ops import move_rows
from titan_moe.ops.move_rows import add_rows, combine_rows, copy_rows, gathered_rows
from titan_moe.ops.permute_indices import copy_to_ranks, max_padded_rows


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
        assert torch.autograd.gradcheck(lambda x: move_rows.gather_rows_twice(x, copies), x_MD)
        assert torch.autograd.gradcheck(lambda x: move_rows.gather_rows_twice(x, copies)[1], x_MD)


@pytest.mark.parametrize("lacks_some", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_terms_are_added_in_order_and_narrow_sums_rounded_once(
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_readers_of_rows_have_the_gradient_of_one_without_a_sum_of_its_own(dtype) -> None:
    """It is bitwise equal to that of one tensor which is read twice."""
    torch.manual_seed(0)
    copies = copy_to_ranks(_reached(20, 5, 3, seed=1), 3)
    x_MD = torch.randn(20, 8).to(dtype).requires_grad_()
    first_RD, second_RD = (torch.randn(len(copies.source_R), 8).to(dtype) for _ in range(2))
    one_RD, two_RD = move_rows.gather_rows_twice(x_MD, copies)
    assert torch.equal(one_RD, two_RD) and one_RD.data_ptr() == two_RD.data_ptr()
    with Operations() as seen:
        (ours,) = torch.autograd.grad([one_RD, two_RD], x_MD, [first_RD, second_RD])
    assert seen.calls["aten.add"] + seen.calls["aten.add_"] == 0
    x_RD = move_rows.gather_rows(x_MD, copies)
    (plain,) = torch.autograd.grad([x_RD * 1, x_RD.clone()], x_MD, [first_RD, second_RD])
    assert torch.equal(ours, plain)


@settings(max_examples=60)
@given(
    st.integers(1, 6).flatmap(
        lambda experts: st.lists(
            st.lists(st.integers(0, 40), min_size=experts, max_size=experts), min_size=1, max_size=5
        )
    ),
    st.sampled_from(ALIGNMENTS),
    st.integers(0, 3),
)
def test_plain_torch_equals_the_slow_loop_on_any_counts(counts, row_alignment, unused):
    check(counts, unused, row_alignment)


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "row_alignment", "expected"),
    [
        (0, 4, 16, 64),
        (1, 4, 16, 64),
        (3, 8, 16, 128),
        (10, 2, 1, 10),
        (10, 2, 8, 24),
        (17, 2, 16, 48),
    ],
)
def test_max_padded_rows_are_those_of_the_worst_counts(
    num_rows, num_experts, row_alignment, expected
):
    assert max_padded_rows(num_rows, num_experts, row_alignment) == expected
