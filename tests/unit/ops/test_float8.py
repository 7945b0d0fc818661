"""Emulated float8 products against an element-by-element oracle, and against exact products."""

import math

import pytest
import torch
from torch import Tensor

from tests.support.grouped_mm_cases import slow_loop
from titan_moe.ops.float8 import float8_grouped_mm, float8_linear

LARGEST = 448.0  # e4m3: 4 bits of exponent, 3 of mantissa.
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
    """Returns `x` rounded to float8, with one scale along `dim` or one for all."""
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


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise"])
def test_float8_linear_multiplies_rounded_operands(recipe: str):
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


def test_mxfp8_experts_multiply_rounded_blocks():
    """Compared with exact products; one expert has no rows, and rows of no expert hold NaN."""
    ends = [32, 32, 96]
    x, w, grad = (drawn(*shape, seed=1).bfloat16() for shape in ((128, 64), (3, 96, 64), (128, 96)))
    exact_y, exact_x, exact_w = slow_loop(x, w, grad, [32, 0, 64])
    x[96:], grad[96:] = math.nan, math.nan
    x.requires_grad_(), w.requires_grad_()
    y = float8_grouped_mm("mxfp8", emulate=True)(x, w, torch.tensor(ends, dtype=torch.int32))
    y.backward(grad)
    pairs = (y[:96], exact_y[:96]), (x.grad[:96], exact_x[:96]), (w.grad, exact_w)
    assert all(0.01 < error(a, b) < 0.06 for a, b in pairs)
    assert not w.grad[1].any()
