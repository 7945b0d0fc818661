"""Norm and clip on plain tensors; tests/distributed has them on shards."""

import pytest
import torch
from torch import nn

from titan_moe.distributed.grad_norm import ParameterNorms, clip_factor, scale_grads, sum_of_squares


def _parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (1000, 7, 3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return parameters


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_of_gradients_that_are_there(dtype: torch.dtype):
    parameters = _parameters(dtype)
    grads = torch.cat([p.grad.double() for p in parameters if p.grad is not None])
    expected = pytest.approx(grads.square().sum().item(), rel=1e-6)
    assert sum_of_squares(parameters, 1).item() == expected


def test_the_norms_of_large_gradients_do_not_depend_on_how_they_are_cut():
    whole = torch.randn(4, 1_000, 1_000, generator=torch.Generator().manual_seed(0))
    exact = whole.double().square().sum((1, 2))
    names, grads = ["norm", "moe.experts.w1"], [whole, whole]
    for parameter, grad in zip(parameters := [nn.Parameter(x) for x in grads], grads, strict=True):
        parameter.grad = grad
    shares: dict = {}
    total = sum_of_squares(parameters, 1, shares).item()
    assert total == pytest.approx(2 * exact.sum().item(), rel=1e-11)
    by_name = ParameterNorms(names, num_experts=4)
    squares = by_name.squares(
        dict(zip(names, parameters, strict=True)), shares, 1, torch.device("cpu")
    )
    torch.testing.assert_close(squares[0], exact.sum(), rtol=1e-11, atol=0)
    torch.testing.assert_close(squares[1:], exact, rtol=1e-8, atol=0)


def test_a_piece_that_four_ranks_hold_counts_a_quarter_on_each():
    parameters = _parameters()
    assert 4 * sum_of_squares(parameters, 4) == sum_of_squares(parameters, 1)


def test_norm_of_no_gradients_is_zero():
    parameters = [nn.Parameter(torch.zeros(3))]
    assert sum_of_squares(parameters, 1) == 0
    scale_grads(parameters, 2.0)


def test_scaling_and_clip_factor():
    parameters = _parameters()
    before = parameters[0].grad.clone()
    scale_grads(parameters, 0.5)
    assert torch.equal(parameters[0].grad, before / 2)
    assert (clip_factor(4.0, 1.0), clip_factor(0.5, 1.0), clip_factor(0.0, 1.0)) == (0.25, 1, 1)
    assert clip_factor(4.0, float("inf")) == 1
