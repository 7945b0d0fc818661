"""Emulated float8 products against an element-by-element oracle, and against exact products."""

import math

import pytest
import torch
from torch import Tensor

from titan_moe.ops.float8 import float8_grouped_mm, float8_linear, rounded

pytest.importorskip("torchao")

LARGEST = 448.0  # Of e4m3: 4 bits of exponent, 3 of mantissa.
GRID = sorted(
    {0.0}
    | {m / 8 * 2.0**-6 for m in range(1, 8)}
    | {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)} - {480.0}
)


def nearest(value: float) -> float:
    """The nearest number of e4m3; of two, the one with an even mantissa."""
    size = min(abs(value), LARGEST)
    distance = min(abs(size - each) for each in GRID)
    hits = [i for i, each in enumerate(GRID) if abs(size - each) == distance]
    return math.copysign(GRID[next((i for i in hits if i % 2 == 0), hits[0])], value)


def slowly_rounded(x: Tensor, dim: int | None, *, power_of_2: bool = True) -> Tensor:
    """What `x` is in float8, one scale along `dim`, or one for all."""
    if dim is None:
        scale = LARGEST / x.abs().max().item()
        return x.clone().apply_(lambda v: nearest(float(torch.tensor(v * scale))) / scale)
    rows = x.movedim(dim, -1).reshape(-1, x.shape[dim])
    done = []
    for row in rows:
        scale = LARGEST / max(row.abs().max().item(), 1e-12)
        if power_of_2:
            scale = 2.0 ** math.floor(math.log2(scale))
        done.append([nearest(v * scale) / scale for v in row.tolist()])
    moved = torch.tensor(done, dtype=x.dtype).view_as(x.movedim(dim, -1))
    return moved.movedim(-1, dim)


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).exp()
    return x.double()


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("dim", [0, 1])
def test_rounding_is_that_of_float8(dim: int):
    x = drawn(12, 20, seed=0)
    x[3] *= 1e6
    x[:, 4] = 0
    torch.testing.assert_close(rounded(x, dim), slowly_rounded(x, dim), rtol=1e-7, atol=0)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise"])
def test_a_linear_multiplies_rounded_operands(recipe: str):
    x, w, grad = drawn(48, 32, seed=1), drawn(16, 32, seed=2), drawn(48, 16, seed=3)
    x.requires_grad_(), w.requires_grad_()
    y = float8_linear(recipe, emulate=True)(x.view(3, 16, 32), w).flatten(0, 1)
    y.backward(grad)
    exact = x @ w.T, grad @ w, grad.T @ x
    ours = y, x.grad, w.grad
    if recipe == "rowwise":
        theirs = (
            slowly_rounded(x.detach(), 1) @ slowly_rounded(w.detach(), 1).T,
            slowly_rounded(grad, 1) @ slowly_rounded(w.detach(), 0),
            slowly_rounded(grad, 0).T @ slowly_rounded(x.detach(), 0),
        )
        assert all(error(a, b) < 1e-6 for a, b in zip(ours, theirs, strict=True))
    if recipe == "rowwise_with_gw_hp":
        assert error(w.grad, exact[2].detach()) < 1e-12
        ours, exact = ours[:2], exact[:2]
    # Each operand's elements are off by at most 1/16 of themselves.
    assert all(0.01 < error(a, b.detach()) < 0.09 for a, b in zip(ours, exact, strict=True))


def grouped(x: Tensor, w: Tensor, grad: Tensor, ends: list[int], rounding) -> tuple[Tensor, ...]:
    """One product after the other: y, and the gradients of x and w."""
    y, grad_x, grad_w = torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(w)
    for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start < end:
            rows = slice(start, end)
            y[rows] = rounding(x[rows], 1) @ rounding(w[e], 1).T
            grad_x[rows] = rounding(grad[rows], 1) @ rounding(w[e], 0)
            grad_w[e] = rounding(grad[rows], 0).T @ rounding(x[rows], 0)
    return y, grad_x, grad_w


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_multiply_rounded_operands(dtype: torch.dtype):
    """An expert without rows among them, and NaN in rows that belong to nobody."""
    ends = [16, 16, 48]
    x, w = drawn(64, 32, seed=1).to(dtype), drawn(3, 16, 32, seed=2).to(dtype)
    grad = drawn(64, 16, seed=3).to(dtype)
    theirs = grouped(x.double(), w.double(), grad.double(), ends, slowly_rounded)
    exact = grouped(x.double(), w.double(), grad.double(), ends, lambda x, dim: x)
    x[48:], grad[48:] = math.nan, math.nan
    x.requires_grad_(), w.requires_grad_()
    y = float8_grouped_mm(emulate=True)(x, w, torch.tensor(ends, dtype=torch.int32))
    y.backward(grad)
    ours = y[:48], x.grad[:48], w.grad
    for a, b, plain in zip(ours, theirs, exact, strict=True):
        assert error(a, b[: len(a)]) < 1e-6
        assert 0.01 < error(a, plain[: len(a)]) < 0.09
    assert not w.grad[1].any()
