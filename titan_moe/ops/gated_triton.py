"""The Triton kernels of gated: one launch and one pass each, arithmetic in at least float32."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.ops.gated import ACTIVATIONS, Activation, GatedGradients

_TILE = 2048
"""Elements of a program's tile: 16 for each thread, of gate, up and gradient at once."""
_MAX_COLUMNS = 512


def gated_rows(
    gate_RF: Tensor, up_RF: Tensor, weights_R1: Tensor | None, activation: str
) -> Tensor:
    """Computes `gated.gated_rows`."""
    gate_RF, up_RF = gate_RF.contiguous(), up_RF.contiguous()
    num_rows, dim = gate_RF.shape
    hidden_RF = torch.empty_like(gate_RF)
    constants = _constants(gate_RF, weights_R1, ACTIVATIONS[activation])
    if hidden_RF.numel():
        rows, columns = constants["ROWS"], constants["COLUMNS"]
        grid = (triton.cdiv(num_rows, rows), triton.cdiv(dim, columns))
        weights = _weights(weights_R1, gate_RF)
        _gated_rows_kernel[grid](gate_RF, up_RF, weights, hidden_RF, num_rows, **constants)
    return hidden_RF


def gated_rows_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weights_R1: Tensor | None, activation: str
) -> GatedGradients:
    """Computes `gated.gated_rows_backward`; the recomputed result overwrites `grad_RF`."""
    grad_RF, gate_RF, up_RF = grad_RF.contiguous(), gate_RF.contiguous(), up_RF.contiguous()
    grad_gate_RF, grad_up_RF = torch.empty_like(gate_RF), torch.empty_like(up_RF)
    num_rows = len(grad_RF)
    grad_weights_R1 = None if weights_R1 is None else weights_R1.new_empty(num_rows, 1)
    constants = _constants(gate_RF, weights_R1, ACTIVATIONS[activation])
    if num_rows:
        _gated_rows_backward_kernel[(triton.cdiv(num_rows, constants["ROWS"]),)](
            grad_RF,
            gate_RF,
            up_RF,
            _weights(weights_R1, gate_RF),
            grad_gate_RF,
            grad_up_RF,
            _weights(grad_weights_R1, gate_RF),
            num_rows,
            **constants,
        )
    return GatedGradients(grad_gate_RF, grad_up_RF, grad_weights_R1, grad_RF)


def _weights(weights_R1: Tensor | None, other: Tensor) -> Tensor:
    """Returns the weights, or any tensor in place of None, which a kernel does not take."""
    return other if weights_R1 is None else weights_R1.contiguous()


def _constants(
    gate_RF: Tensor, weights_R1: Tensor | None, activation: Activation
) -> dict[str, Any]:
    """Constants of both kernels. A tile's rows and columns are powers of two."""
    dim = gate_RF.shape[1]
    columns = min(triton.next_power_of_2(dim), _MAX_COLUMNS)
    limit, slope = activation.clamp or (0.0, 0.0)
    return {
        "DIM": dim,
        "HAS_WEIGHTS": weights_R1 is not None,
        "CLAMPED": activation.clamp is not None,
        "LIMIT": limit,
        "SLOPE": slope,
        "ROWS": _TILE // columns,
        "COLUMNS": columns,
        "WIDE": gate_RF.element_size() == 8,
    }


@triton.jit
def _parts(gate, up, CLAMPED: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr):
    """Returns silu(gate), its slope, and its factor. NaN stays NaN, as in torch.clamp."""
    if CLAMPED:
        nan: tl.constexpr = tl.PropagateNan.ALL
        low = tl.minimum(gate, LIMIT, propagate_nan=nan)
        sigmoid = 1 / (1 + tl.exp(-SLOPE * low))
        slope = tl.where(gate > LIMIT, 0, sigmoid * (1 + SLOPE * low * (1 - sigmoid)))
        silu = low * sigmoid
        factor = tl.minimum(tl.maximum(up, -LIMIT, propagate_nan=nan), LIMIT, propagate_nan=nan) + 1
    else:
        sigmoid = 1 / (1 + tl.exp(-gate))
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        silu = gate * sigmoid
        factor = up
    return silu, slope, factor


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rows_kernel(
    gate_ptr,
    up_ptr,
    weights_ptr,
    hidden_ptr,
    num_rows,
    DIM: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    CLAMPED: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
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
    silu, _, factor = _parts(gate, up, CLAMPED, LIMIT, SLOPE)
    hidden = silu * factor
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
    CLAMPED: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
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
        silu, slope, factor = _parts(gate, up, CLAMPED, LIMIT, SLOPE)
        hidden = silu * factor
        grad_weight += tl.sum(hidden * grad, 1)
        grad *= weight[:, None]
        grad_up = grad * silu
        if CLAMPED:
            grad_up = tl.where(tl.abs(up) > LIMIT, 0, grad_up)
        tl.store(grad_gate_ptr + place, (grad * factor * slope).to(out), mask=inside)
        tl.store(grad_up_ptr + place, grad_up.to(out), mask=inside)
        tl.store(grad_ptr + place, (hidden * weight[:, None]).to(out), mask=inside)
    if HAS_WEIGHTS:
        tl.store(grad_weights_ptr + row, grad_weight, mask=is_row)
