"""The Triton kernels of gated: one launch and one pass each, arithmetic in at least float32."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.ops.activation import Activation
from titan_moe.ops.gated import GatedGradients

_TILE = 2048
"""Elements of a program's tile: 16 for each thread, of gate, up and gradient at once."""
_MAX_COLUMNS = 512


def gated_rows(
    gate_RF: Tensor, up_RF: Tensor | None, weights_R1: Tensor | None, activation: Activation
) -> Tensor:
    """Computes `gated.gated_rows`."""
    gate_RF, up_RF = gate_RF.contiguous(), _or_other(up_RF, gate_RF)
    num_rows, dim = gate_RF.shape
    hidden_RF = torch.empty_like(gate_RF)
    constants = _constants(gate_RF, weights_R1, activation)
    if hidden_RF.numel():
        rows, columns = constants["ROWS"], constants["COLUMNS"]
        grid = (triton.cdiv(num_rows, rows), triton.cdiv(dim, columns))
        weights = _or_other(weights_R1, gate_RF)
        _gated_rows_kernel[grid](gate_RF, up_RF, weights, hidden_RF, num_rows, **constants)
    return hidden_RF


def gated_rows_backward(
    grad_RF: Tensor,
    gate_RF: Tensor,
    up_RF: Tensor | None,
    weights_R1: Tensor | None,
    activation: Activation,
) -> GatedGradients:
    """Computes `gated.gated_rows_backward`; the recomputed result overwrites `grad_RF`."""
    grad_RF, gate_RF = grad_RF.contiguous(), gate_RF.contiguous()
    grad_gate_RF = torch.empty_like(gate_RF)
    grad_up_RF = None if up_RF is None else torch.empty_like(gate_RF)
    num_rows = len(grad_RF)
    grad_weights_R1 = None if weights_R1 is None else weights_R1.new_empty(num_rows, 1)
    constants = _constants(gate_RF, weights_R1, activation)
    if num_rows:
        _gated_rows_backward_kernel[(triton.cdiv(num_rows, constants["ROWS"]),)](
            grad_RF,
            gate_RF,
            _or_other(up_RF, gate_RF),
            _or_other(weights_R1, gate_RF),
            grad_gate_RF,
            _or_other(grad_up_RF, gate_RF),
            _or_other(grad_weights_R1, gate_RF),
            num_rows,
            **constants,
        )
    return GatedGradients(grad_gate_RF, grad_up_RF, grad_weights_R1, grad_RF)


def _or_other(x: Tensor | None, other: Tensor) -> Tensor:
    """Returns a contiguous tensor, or any in place of None, which a kernel does not take."""
    return other if x is None else x.contiguous()


def _constants(
    gate_RF: Tensor, weights_R1: Tensor | None, activation: Activation
) -> dict[str, Any]:
    """Constants of both kernels. A tile's rows and columns are powers of two."""
    dim, limit = gate_RF.shape[1], activation.limit
    columns = min(triton.next_power_of_2(dim), _MAX_COLUMNS)
    return {
        "DIM": dim,
        "HAS_WEIGHTS": weights_R1 is not None,
        "FUNCTION": activation.function,
        "GATED": activation.gated,
        "SLOPE": activation.slope,
        "CLAMPS": "never" if limit is None else activation.clamps,
        "LIMIT": limit or 0.0,
        "SHIFT": activation.up_shift,
        "ROWS": _TILE // columns,
        "COLUMNS": columns,
        "WIDE": gate_RF.element_size() == 8,
    }


@triton.jit
def _tanh(x):
    """Returns tanh(x); near zero by its series, where the quotient would lose digits."""
    power = tl.exp(-2 * tl.abs(x))
    quotient = (1 - power) / (1 + power)
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(tl.abs(x) < 0.02, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def _parts(gate, up, FUNCTION, GATED, SLOPE, CLAMPS, LIMIT, SHIFT):
    """Returns the function of the gate, its slope, and its factor. NaN stays NaN, as in
    torch.clamp."""
    nan: tl.constexpr = tl.PropagateNan.ALL
    x = tl.minimum(gate, LIMIT, propagate_nan=nan) if CLAMPS == "before" else gate
    factor = up if GATED else 1.0
    if FUNCTION == "relu2":
        root = tl.maximum(x, 0, propagate_nan=nan)
        slope, value = 2 * root, root * root
    elif FUNCTION == "situ":
        sigmoid, tanh = 1 / (1 + tl.exp(-x)), _tanh(x / 4)
        slope = sigmoid * (1 - tanh * tanh + 4 * tanh * (1 - sigmoid))
        value, factor = 4 * tanh * sigmoid, 25 * _tanh(up / 25)
    elif FUNCTION == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z), and 2 z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
        sigmoid = 1 / (1 + tl.exp(-1.5957691216057308 * x * (1 + 0.044715 * x * x)))
        steep = 1.5957691216057308 * (1 + 0.134145 * x * x)
        slope, value = sigmoid * (1 + steep * x * (1 - sigmoid)), x * sigmoid
    else:
        sigmoid = 1 / (1 + tl.exp(-SLOPE * x))
        slope, value = sigmoid * (1 + SLOPE * x * (1 - sigmoid)), x * sigmoid
    if CLAMPS != "never":
        slope = tl.where((value if CLAMPS == "after" else gate) > LIMIT, 0, slope)
        if CLAMPS == "after":
            value = tl.minimum(value, LIMIT, propagate_nan=nan)
        if GATED and FUNCTION != "situ":
            factor = tl.maximum(up, -LIMIT, propagate_nan=nan)
            factor = tl.minimum(factor, LIMIT, propagate_nan=nan)
    return value, slope, factor + SHIFT if SHIFT != 0 else factor


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rows_kernel(
    gate_ptr,
    up_ptr,
    weights_ptr,
    hidden_ptr,
    num_rows,
    DIM: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    SLOPE: tl.constexpr,
    CLAMPS: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    dtype = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = row < num_rows
    inside = is_row[:, None] & (column < DIM)[None, :]
    place = row[:, None] * DIM + column[None, :]
    gate = tl.load(gate_ptr + place, mask=inside, other=0).to(dtype)
    up = tl.load(up_ptr + place, mask=inside, other=0).to(dtype)
    value, _, factor = _parts(gate, up, FUNCTION, GATED, SLOPE, CLAMPS, LIMIT, SHIFT)
    hidden = value * factor
    if HAS_WEIGHTS:
        hidden *= tl.load(weights_ptr + row, mask=is_row, other=0).to(dtype)[:, None]
    tl.store(hidden_ptr + place, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rows_backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    weights_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    grad_weights_ptr,
    num_rows,
    DIM: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    SLOPE: tl.constexpr,
    CLAMPS: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Each program has whole rows, and adds up their products with the gradient in a fixed
    order."""
    dtype = tl.float64 if WIDE else tl.float32
    out = grad_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    weight = tl.full((ROWS,), 1, dtype)
    if HAS_WEIGHTS:
        weight = tl.load(weights_ptr + row, mask=is_row, other=0).to(dtype)
    grad_weight = tl.zeros((ROWS,), dtype)
    for first in range(0, DIM, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = is_row[:, None] & (column < DIM)[None, :]
        place = row[:, None] * DIM + column[None, :]
        gate = tl.load(gate_ptr + place, mask=inside, other=0).to(dtype)
        up = tl.load(up_ptr + place, mask=inside, other=0).to(dtype)
        grad = tl.load(grad_ptr + place, mask=inside, other=0).to(dtype)
        value, slope, factor = _parts(gate, up, FUNCTION, GATED, SLOPE, CLAMPS, LIMIT, SHIFT)
        hidden = value * factor
        grad_weight += tl.sum(hidden * grad, 1)
        grad *= weight[:, None]
        grad_up = grad * value
        if FUNCTION == "situ":
            grad_up *= 1 - factor * factor / 625
        elif CLAMPS != "never":
            grad_up = tl.where(tl.abs(up) > LIMIT, 0, grad_up)
        tl.store(grad_gate_ptr + place, (grad * factor * slope).to(out), mask=inside)
        if GATED:
            tl.store(grad_up_ptr + place, grad_up.to(out), mask=inside)
        tl.store(grad_ptr + place, (hidden * weight[:, None]).to(out), mask=inside)
    if HAS_WEIGHTS:
        tl.store(grad_weights_ptr + row, grad_weight, mask=is_row)
