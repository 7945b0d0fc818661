"""grouped_mm and add_bias, with all gradients, against loops over rows."""

import pytest
import torch

from tests.support.grouped_mm_cases import SIZES, TOLERANCE, check_against_the_slow_loop
from titan_moe.ops.grouped_mm import add_bias, grouped_mm


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("shape", [(16, 24), (7, 24), (16, 5)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_grouped_mm_equals_a_slow_loop_and_never_reads_the_tail(dtype, shape, case):
    check_against_the_slow_loop(dtype, shape, case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_grouped_mm_takes_an_expanded_gradient(dtype):
    x = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    w = torch.randn(2, 8, 8, dtype=dtype, requires_grad=True)
    grouped_mm(x, w, torch.tensor([2, 6], dtype=torch.int32)).sum().backward()
    torch.testing.assert_close(x.grad[0], w[0].detach().sum(0))


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
