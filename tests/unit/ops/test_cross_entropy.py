"""Cross-entropy of whole and of cut logits against torch's loss: plain and interpreted kernels."""

import pytest
import torch

from tests.support.cross_entropy_cases import DTYPES, SIZES, check
from tests.support.interpret import count_interpreted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_equals_torchs_loss(dtype: torch.dtype) -> None:
    assert check(dtype) == 2 * len(SIZES)


def test_triton_kernels_in_the_interpreter_equal_torchs_loss() -> None:
    assert count_interpreted("cross_entropy") == 2 * len(SIZES) * len(DTYPES)
