"""Cases for the activations of feed-forwards, and autograd in float64 to compare with."""

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.ops.activation import CLAMPED_SWIGLU, SWIGLU, Activation
from titan_moe.ops.gated import gated_rows, gated_rows_backward

ACTIVATIONS = {
    "swiglu": SWIGLU,
    "gpt-oss": CLAMPED_SWIGLU,
    "DeepSeek-V4": Activation(limit=10.0),
    "Step-3.7": Activation(limit=7.0, clamps="after"),
    "Gemma 4": Activation("gelu_tanh"),
    "Nemotron 3": Activation("relu2", gated=False),
    "Kimi-K3": Activation("situ"),
}

# (rows, F): odd, one column, several tiles wide, several programs, none at all.
SIZES = [(5, 3), (3, 1), (7, 1100), (70, 96), (0, 8)]
SMALL = 70
"""Rows of a case with small numbers."""
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# Wide types have the arithmetic's rounding, narrow ones their own in every pass.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}
# Kernels round once, and are compared with the exact result in the type that they store.
ROUNDED_ONCE = TOLERANCES | {torch.bfloat16: 5e-4}


class Case(NamedTuple):
    name: str
    gate_up: list[Tensor]
    weights_R1: Tensor | None
    grad_RF: Tensor


def cases(dtype: torch.dtype, device: str = "cpu") -> Iterator[Case]:
    """Wide enough that both sides of every clamp occur, and its bounds. Weights are in at least
    float32."""
    drawn = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=drawn, dtype=torch.float64).to(dtype).to(device)

    for name, weighted, (rows, dim) in product(ACTIVATIONS, (False, True), SIZES):
        scale = 1e-3 if rows == SMALL else 6
        gate_up = [scale * draw(rows, dim) for _ in range(1 + ACTIVATIONS[name].gated)]
        for x, (row, bound) in product(gate_up, enumerate((7.0, 10.0, -7.0, -10.0))):
            if rows != SMALL:
                x[row::5, :1] = bound
        yield Case(name, gate_up, draw(rows, 1, dtype=wide) if weighted else None, draw(rows, dim))


def plain(name: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The activation as its definition has it, for autograd."""
    if up is None:
        return F.relu(gate) ** 2
    if name == "gpt-oss":
        low = _below(gate, 7.0)
        return low * torch.sigmoid(1.702 * low) * (_within(up, 7.0) + 1)
    if name == "DeepSeek-V4":
        return F.silu(_below(gate, 10.0)) * _within(up, 10.0)
    if name == "Step-3.7":
        return _below(F.silu(gate), 7.0) * _within(up, 7.0)
    if name == "Gemma 4":
        cubic = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(cubic)) * up
    if name == "Kimi-K3":
        return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    return F.silu(gate) * up


# A bound itself has a gradient, as torch.clamp's has no longer in torch 2.14.
def _below(x: Tensor, bound: float) -> Tensor:
    return torch.where(x > bound, bound, x)


def _within(x: Tensor, bound: float) -> Tensor:
    return torch.where(x.abs() > bound, bound * x.sign(), x)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x` as a kernel stores it: Triton's interpreter truncates to bfloat16."""
    if x.is_cuda or dtype != torch.bfloat16:
        return x.to(dtype)
    return (x.float().view(torch.int32) & -65536).view(torch.float32)


def check(dtype: torch.dtype, device: str = "cpu", *, rounds_once: bool = False) -> None:
    """Checks values and gradients against autograd in float64."""
    for case in cases(dtype, device):
        gate_up = [x.double().requires_grad_() for x in case.gate_up]
        inputs, weights = list(gate_up), None
        expected = plain(case.name, *gate_up)
        if case.weights_R1 is not None:
            weights = case.weights_R1.double().requires_grad_()
            expected, inputs = expected * weights, [*inputs, weights]
        wanted = torch.autograd.grad(expected, inputs, case.grad_RF.double())

        kept = [x.clone() for x in case.gate_up]
        gate, up = [*case.gate_up, None][:2]
        operands = gate, up, case.weights_R1, ACTIVATIONS[case.name]
        hidden = gated_rows(*operands)
        found = gated_rows_backward(case.grad_RF.clone(), *operands)
        assert (found.up_RF is None) == (up is None)
        grads = [x for x in found[:3] if x is not None]
        results = [hidden, found.hidden_RF, *grads]
        for ours, theirs in zip(results, [expected, expected, *wanted], strict=True):
            assert ours is not None and ours.shape == theirs.shape and ours.is_contiguous()
            is_of_weights = weights is not None and ours is found.weights_R1
            assert ours.dtype == (case.weights_R1 if is_of_weights else case.grad_RF).dtype
            limit = ROUNDED_ONCE[ours.dtype] if rounds_once else TOLERANCES[dtype]
            theirs = stored(theirs.detach(), ours.dtype).double() if rounds_once else theirs
            error, size = (ours.double() - theirs).norm(), theirs.norm()
            assert error <= limit * size, (case.name, ours.shape, error / size)
        assert all(torch.equal(a, b) for a, b in zip(kept, case.gate_up, strict=True))
    _check_what_is_not_finite(dtype, device)


def check_kernels(device: str) -> None:
    for dtype in DTYPES:
        check(dtype, device, rounds_once=True)


def _check_what_is_not_finite(dtype: torch.dtype, device: str) -> None:
    """NaN and infinities become what the definition makes of them: no clamp drops them."""
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 2.0], dtype=dtype, device=device)
    both = values.repeat_interleave(4)[None], values.repeat(4)[None]
    for name, activation in ACTIVATIONS.items():
        gate, up = both if activation.gated else (both[0], None)
        expected = plain(name, gate.double(), None if up is None else up.double())
        found = gated_rows_backward(torch.ones_like(gate), gate, up, None, activation)
        for hidden in (gated_rows(gate, up, None, activation), found.hidden_RF):
            torch.testing.assert_close(hidden.double(), expected, rtol=0.02, atol=0, equal_nan=True)
        assert found.gate_RF[gate.isnan()].isnan().all()
