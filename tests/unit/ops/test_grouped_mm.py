"""grouped_mm and both of its gradients against one float64 product per row."""

import pytest
import torch

from tests.support.grouped_mm_cases import SIZES, TOLERANCE, check_against_the_slow_loop
from titan_moe.ops.grouped_mm import grouped_mm, slow_on_gpu


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


@pytest.mark.parametrize(
    ("dtype", "capability", "reason"),
    [
        (torch.bfloat16, (9, 0), ""),
        (torch.bfloat16, (10, 0), ""),
        (torch.bfloat16, (8, 0), "the GPU has compute capability 8.0, not 9.0"),
        (torch.float32, (9, 0), "experts compute in float32, not in bfloat16"),
    ],
)
def test_what_a_gpu_multiplies_expert_after_expert(dtype, capability, reason):
    assert slow_on_gpu(dtype, capability) == reason
