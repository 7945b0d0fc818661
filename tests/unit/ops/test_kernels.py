"""Functions in plain torch, and interpreted Triton kernels, against slow formulas in float64."""

import pytest
import torch

from tests.support.interpret import CASES, cases_of, check_interpreted

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["cross_entropy", "gated", "move_rows"])
def test_operations_in_plain_torch_equal_slow_formulas(name: str, dtype: torch.dtype) -> None:
    cases_of(name).check(dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_rotations_equal_products_of_complex_numbers(dtype: torch.dtype) -> None:
    cases_of("rotate").check(dtype)


@pytest.mark.parametrize("name", ["permute", "sort_rows"])
def test_index_maps_in_plain_torch_equal_the_slow_loops(name: str) -> None:
    cases_of(name).check_kernels("cpu")


@pytest.mark.parametrize("name", CASES)
def test_interpreted_triton_kernels_equal_the_slow_formulas(name: str) -> None:
    check_interpreted(name)
