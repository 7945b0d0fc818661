"""add_bias and all its gradients against a loop over rows."""

import pytest
import torch

from tests.support.grouped_mm_cases import SIZES
from titan_moe.ops.grouped_mm import add_bias


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", SIZES)
def test_biases_are_added_to_rows_and_their_gradient_is_the_sum_over_them(
    case: str, weighted: bool
):
    counts, tail = SIZES[case]
    num_rows = sum(counts) + tail
    like = {"dtype": torch.float64, "requires_grad": True}
    y, bias = torch.randn(num_rows, 5, **like), torch.randn(len(counts), 5, **like)
    weights = torch.rand(num_rows, 1, **like) if weighted else None
    offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    if weights is not None:
        weights.data[sum(counts) :] = torch.nan
    out = add_bias(y, bias, offsets, weights)
    grad = torch.randn_like(out)
    grad[sum(counts) :] = torch.nan
    out.backward(grad)
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    expected = torch.zeros_like(bias)
    for row, expert in enumerate(experts):
        weight = 1.0 if weights is None else weights[row, 0].item()
        torch.testing.assert_close(out[row], y[row] + weight * bias[expert])
        expected[expert] += weight * grad[row]
        assert torch.equal(y.grad[row], grad[row])
        if weights is not None:
            torch.testing.assert_close(weights.grad[row, 0], grad[row] @ bias[expert])
    torch.testing.assert_close(bias.grad, expected)
