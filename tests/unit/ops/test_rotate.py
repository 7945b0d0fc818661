"""Rotations against complex multiplication: plain torch and the interpreted kernel."""

import pytest
import torch

from tests.support.interpret import count_interpreted
from tests.support.rotate_cases import DTYPES, NUM_CASES, check


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_and_gradients_are_those_of_complex_numbers(dtype: torch.dtype) -> None:
    assert check(dtype) == NUM_CASES


def test_the_kernel_in_the_interpreter_equals_complex_multiplication() -> None:
    assert count_interpreted("rotate") == NUM_CASES * len(DTYPES)
