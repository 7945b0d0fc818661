"""grouped_mm and both of its gradients against one float64 product per row."""

import pytest
import torch

from tests.support.grouped_mm_cases import SIZES, TOLERANCE, check_against_the_slow_loop
from titan_moe.ops.grouped_mm import grouped_mm


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("shape", [(16, 24), (7, 24), (16, 5)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_the_slow_loop_and_never_reads_the_tail(dtype, shape, case):
    check_against_the_slow_loop(dtype, shape, case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_takes_an_expanded_gradient(dtype):
    x = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    w = torch.randn(2, 8, 8, dtype=dtype, requires_grad=True)
    grouped_mm(x, w, torch.tensor([2, 6], dtype=torch.int32)).sum().backward()
    assert torch.allclose(x.grad[0], w[0].sum(0))
