"""Products of bfloat16 operands in float32 against float64."""

import torch

from titan_moe.ops.split_linear import parts, split_linear, split_linear_reference


def test_parts_add_up() -> None:
    torch.manual_seed(0)
    x = torch.randn(10_000) * torch.randn(10_000).exp()
    high, middle, low = (part.double() for part in parts(x))
    assert ((high + middle + low - x.double()).abs() <= 2.0**-24 * x.abs()).all()
    assert (middle.abs() <= 2.0**-8 * high.abs()).all()


def test_products_and_gradients_are_those_of_float32() -> None:
    torch.manual_seed(1)
    x_TD, w_ED = torch.randn(40, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    grad_TE = torch.randn(40, 16)
    results = []
    for product in (split_linear, split_linear_reference):
        x, w = x_TD.clone().requires_grad_(), w_ED.clone().requires_grad_()
        y = product(x, w)
        assert y.dtype == torch.float32
        y.backward(grad_TE)
        results.append((y.detach(), x.grad, w.grad))
    x, w, grad = x_TD.double(), w_ED.double(), grad_TE.double()
    exact = x @ w.T, grad @ w, grad.T @ x
    for ours, theirs, bound, true in zip(*results, (1e-6, 3e-3, 3e-3), exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours.double() - true).norm() < bound * true.norm()
        # Rounded to bfloat16 once: hardly ever otherwise.
        assert (ours != theirs).double().mean() < 0.01
