"""The gated activations against autograd: the torch reference and the interpreted kernels."""

import pytest
import torch

from tests.support.gated_cases import TOLERANCES, cases, check
from tests.support.interpret import count_interpreted

NUM_CASES = len(list(cases(torch.float64)))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_values_and_gradients_equal_autograd(dtype: torch.dtype) -> None:
    assert check(dtype) == NUM_CASES


def test_triton_kernels_in_the_interpreter_equal_autograd() -> None:
    assert count_interpreted("gated") == NUM_CASES * len(TOLERANCES)
