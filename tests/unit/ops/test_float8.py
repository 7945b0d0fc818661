"""Emulated float8 products against an element-by-element oracle, and against exact products."""

import math

import pytest
import torch
from torch import Tensor

from titan_moe.ops.blockscaled import rounded_blocks, rounded_mx, rounded_squares
from titan_moe.ops.float8 import float8_grouped_mm, float8_linear, rounded

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
    """An expert without rows among them, and NaN in rows that belong to no expert."""
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


def slowly_blocked(x: Tensor, dim: int, *, size: int = 128, scale=None) -> Tensor:
    """Element by element; a scale for each `size` elements along `dim`, the last of them fewer."""
    scale = scale or (lambda largest: float(torch.tensor(LARGEST / max(largest, 1e-12)).float()))
    moved = x.movedim(dim, -1)
    done = []
    for row in moved.reshape(-1, x.shape[dim]):
        for block in row.split(size):
            factor = scale(block.abs().max().item())
            done.append(all_nearest((block * factor).float().double()) / factor)
    return torch.cat(done).to(x.dtype).view_as(moved).movedim(-1, dim)


def all_nearest(values: Tensor) -> Tensor:
    """`nearest` of each, against the whole grid."""
    grid = torch.tensor(GRID, dtype=torch.float64)
    distances = (values.abs().clamp(max=LARGEST)[:, None] - grid).abs()
    ties = distances == distances.amin(1, keepdim=True)
    even = torch.arange(len(grid)) % 2 == 0
    return grid[(ties * (1 + even.int())).argmax(1)].copysign(values)


def test_both_ways_to_the_nearest_number():
    values = torch.cat([drawn(200, seed=9) * 300, torch.tensor([0.0, -17.0, 19.0, 2.0**-10])])
    theirs = torch.tensor([nearest(value) for value in values.tolist()])
    assert torch.equal(all_nearest(values.double()).float(), theirs)


def slowly_mx(x: Tensor, dim: int) -> Tensor:
    """The smallest power of two under which the largest element fits; 1 for zeros."""

    def scale(largest: float) -> float:
        power = -200
        while largest and 2.0**power * LARGEST < largest:
            power += 1
        return 2.0 ** -min(max(power, -127), 127) if largest else 1.0

    return slowly_blocked(x, dim, size=32, scale=scale)


def slowly_squared(w: Tensor, dim: int, size: int = 128) -> Tensor:
    done = torch.empty_like(w)
    for rows in range(0, w.shape[0], size):
        for columns in range(0, w.shape[1], size):
            square = w[rows : rows + size, columns : columns + size]
            flat = slowly_blocked(square.reshape(1, -1), 1, size=size * size)
            done[rows : rows + size, columns : columns + size] = flat.view_as(square)
    return done


@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_of_mxfp8(dim: int):
    x = drawn(64, 96, seed=0)
    x[3, :40] *= 1e6
    x[:, 4] = 0
    x[32:, 5] = 0
    x[0, :32] = 448.0 * 2.0**-9  # A power of two times the largest: nothing is to spare.
    x[1, :32] = 448.0 * (1 + 2.0**-7)
    x[2, :32] = 1e-39
    x = x.float().double()
    torch.testing.assert_close(rounded_mx(x, dim), slowly_mx(x, dim), rtol=0, atol=0)


def test_mxfp8_is_that_of_torchao():
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    x = (drawn(64, 96, seed=5) * drawn(64, 1, seed=6).exp()).bfloat16()
    scale, data = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    theirs = to_dtype(data, scale, torch.float8_e4m3fn, 32, torch.float32)
    assert torch.equal(rounded_mx(x, -1).float(), theirs)


@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_of_128(dim: int):
    x = drawn(144, 160, seed=0)
    x[3, :130] *= 1e6
    x[:, 4] = 0
    torch.testing.assert_close(rounded_blocks(x, dim), slowly_blocked(x, dim), rtol=1e-7, atol=0)


def test_squares_of_128():
    w = drawn(256, 128, seed=0)
    w[130, 5] = 1e5
    theirs = slowly_squared(w, 0)
    torch.testing.assert_close(rounded_squares(w, 0), theirs, rtol=1e-7, atol=0)
    torch.testing.assert_close(rounded_squares(w.t(), 1), theirs.t(), rtol=1e-7, atol=0)
    stacked = torch.stack([w, w * 2])
    assert torch.equal(rounded_squares(stacked, 1)[0], rounded_squares(w, 1))


def test_blocks_of_128_are_those_of_torchao():
    from torchao.prototype.blockwise_fp8_training import kernels

    x = drawn(256, 128, seed=7).float()
    for ours, (data, scale) in (
        (rounded_blocks(x, 1), kernels.torch_blockwise_scale_act_quant_lhs(x)),
        (rounded_blocks(x, 0), kernels.torch_blockwise_scale_act_quant_rhs(x)),
        (rounded_squares(x, 0), kernels.torch_blockwise_scale_weight_quant(x)),
    ):
        ratio = [have // of for have, of in zip(x.shape, scale.shape, strict=True)]
        whole = scale.repeat_interleave(ratio[0], 0).repeat_interleave(ratio[1], 1)
        torch.testing.assert_close(ours, data.float() * whole, rtol=2e-7, atol=0)


BLOCK_RECIPES = {
    "mxfp8": (32, slowly_mx, slowly_mx),
    "blockwise": (128, slowly_blocked, slowly_squared),
}


@pytest.mark.parametrize("recipe", BLOCK_RECIPES)
def test_experts_multiply_blocks(recipe: str):
    """An expert without rows among them, and NaN in rows that belong to no expert."""
    unit, activations, weights = BLOCK_RECIPES[recipe]
    ends = [unit, unit, 3 * unit]
    rows, dims = 4 * unit, (2 * unit, unit)
    x, w = drawn(rows, dims[0], seed=1), drawn(3, dims[1], dims[0], seed=2)
    grad = drawn(rows, dims[1], seed=3)
    y, grad_x, grad_w = torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(w)
    for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start < end:
            at = slice(start, end)
            y[at] = activations(x[at], 1) @ weights(w[e], 1).T
            grad_x[at] = activations(grad[at], 1) @ weights(w[e], 0)
            grad_w[e] = activations(grad[at], 0).T @ activations(x[at], 0)
    exact = grouped(x, w, grad, ends, lambda x, dim: x)
    x[ends[-1] :], grad[ends[-1] :] = math.nan, math.nan
    x.requires_grad_(), w.requires_grad_()
    product = float8_grouped_mm(recipe, emulate=True)
    ours_y = product(x, w, torch.tensor(ends, dtype=torch.int32))
    ours_y.backward(grad)
    ours = ours_y[: ends[-1]], x.grad[: ends[-1]], w.grad
    for a, b, plain in zip(ours, (y, grad_x, grad_w), exact, strict=True):
        assert error(a, b[: len(a)]) < 1e-6
        assert 0.01 < error(a, plain[: len(a)]) < 0.06
    assert not w.grad[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_multiplies_blocks(dtype: torch.dtype):
    x, w, grad = (drawn(*shape, seed=1) for shape in ((96, 256), (128, 256), (96, 128)))
    x, w, grad = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), grad.to(dtype)
    y = float8_linear("blockwise", emulate=True)(x.view(3, 32, 256), w).flatten(0, 1)
    y.backward(grad)
    ours = y.detach(), x.grad, w.grad
    assert all(each.dtype is dtype for each in ours)
    x, w, grad = x.detach().double(), w.detach().double(), grad.double()
    theirs = (
        slowly_blocked(x, 1) @ slowly_squared(w, 1).T,
        slowly_blocked(grad, 1) @ slowly_squared(w, 0),
        slowly_blocked(grad, 0).T @ slowly_blocked(x, 0),
    )
    bound = 1e-6 if dtype is torch.float32 else 4e-3
    exact = x @ w.T, grad @ w, grad.T @ x
    for a, b, plain in zip(ours, theirs, exact, strict=True):
        assert error(a, b) < bound
        assert 0.01 < error(a, plain) < 0.06
