"""The activations between a feed-forward's projections, times an expert's routing weights.

In plain torch each is a chain of elementwise passes over rows that are F wide; on CUDA the chain is
one Triton kernel forward and one backward. While a graph is traced the plain form stays, which the
compiler fuses itself. Routing weights may be wider than the rows: the kernels multiply with them as
they are, and plain torch, each of whose passes rounds, rounds them too. An activation that is not
gated has no up: it is None, and so is its gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.ops.activation import SWIGLU, Activation
from titan_moe.ops.operation import bent, with_kernel

Pull = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Takes the gradient of the hidden rows, which it may overwrite; returns those of gate and up."""

PullOne = Callable[[Tensor], Tensor]
"""Takes the gradient of a function's result, which it may overwrite; returns that of its argument.
"""


class GatedGradients(NamedTuple):
    """Holds the gradients of the inputs of `gated_rows`, and its recomputed result."""

    gate_RF: Tensor
    up_RF: Tensor | None
    weights_R1: Tensor | None
    hidden_RF: Tensor
    """Recomputed result; not a gradient."""


@with_kernel("gated_triton")
def gated_rows(
    gate_RF: Tensor, up_RF: Tensor | None, weights_R1: Tensor | None, activation: Activation
) -> Tensor:
    """Returns hidden_RF: activation(gate, up), times each row's weight if there are weights."""
    # Not in place: a compiled autograd function of torch 2.11 that returns what it wrote into has
    # gradients of zero.
    hidden_RF, _ = hidden_and_pull(gate_RF, up_RF, activation)
    return hidden_RF if weights_R1 is None else hidden_RF * weights_R1.to(hidden_RF.dtype)


@with_kernel("gated_triton")
def gated_rows_backward(
    grad_RF: Tensor,
    gate_RF: Tensor,
    up_RF: Tensor | None,
    weights_R1: Tensor | None,
    activation: Activation,
) -> GatedGradients:
    """Computes gradients from that of `gated_rows`'s result, which it may overwrite."""
    hidden_RF, pull = hidden_and_pull(gate_RF, up_RF, activation)
    grad_weights_R1 = None
    if weights_R1 is not None:
        grad_weights_R1 = (hidden_RF * grad_RF).sum(-1, keepdim=True).to(weights_R1.dtype)
        weights_R1 = weights_R1.to(hidden_RF.dtype)
        hidden_RF.mul_(weights_R1)
        grad_RF.mul_(weights_R1)
    return GatedGradients(*pull(grad_RF), grad_weights_R1, hidden_RF)


class Activated(torch.autograd.Function):
    """Computes `gated_rows`; keeps gate, up and the weights alone."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        gate_RF: Tensor,
        up_RF: Tensor | None,
        weights_R1: Tensor | None,
        activation: Activation,
    ) -> Tensor:
        ctx.save_for_backward(gate_RF, up_RF, weights_R1)  # type: ignore[arg-type]
        ctx.activation = activation  # type: ignore[attr-defined]
        return gated_rows(gate_RF, up_RF, weights_R1, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RF: Tensor):  # type: ignore[override, no-untyped-def]
        gate_RF, up_RF, weights_R1 = ctx.saved_tensors
        grads = gated_rows_backward(grad_RF.clone(), gate_RF, up_RF, weights_R1, ctx.activation)
        return grads.gate_RF, grads.up_RF, grads.weights_R1, None


def activated(gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
    """Computes activation(gate, up), of any shape, for autograd.

    SwiGLU stays two operations of torch, the first of which rounds: what is saved beside gate and
    up, silu(gate), keeps the bits of earlier runs on CUDA.
    """
    if up is not None and activation == SWIGLU:
        return F.silu(gate) * up
    rows = gate.flatten(0, -2), None if up is None else up.flatten(0, -2)
    return Activated.apply(*rows, None, activation).view_as(gate)


def hidden_and_pull(gate: Tensor, up: Tensor | None, activation: Activation) -> tuple[Tensor, Pull]:
    """Returns the hidden rows, in memory of their own, and the function that their backward needs.
    Plain arithmetic, which autograd does not record."""
    limit, clamps_after = activation.limit, activation.clamps == "after"
    low = gate if limit is None or clamps_after else gate.clamp(max=limit)
    value, pull_value = _FUNCTIONS[activation.function](low, activation.slope)
    bounded = value.clamp(max=limit) if limit is not None and clamps_after else value

    def pull_gate(grad: Tensor) -> Tensor:
        grad = pull_value(grad)
        above = value if clamps_after else gate
        return grad if limit is None else grad.masked_fill_(above > limit, 0)

    if up is None:
        return bounded, lambda grad: (pull_gate(grad), None)
    factor, pull_up = _factor(up, activation)

    def pull(grad: Tensor) -> tuple[Tensor, Tensor]:
        grad_up = pull_up(bounded.mul_(grad))
        return pull_gate(grad.mul_(factor)), grad_up

    return bounded * factor, pull


def _factor(up: Tensor, activation: Activation) -> tuple[Tensor, PullOne]:
    if activation.function == "situ":
        factor, slope = bent(up, 25.0)
        return factor, lambda grad: grad.mul_(slope)
    limit, shift = activation.limit, activation.up_shift
    bounded = up if limit is None else up.clamp(-limit, limit)
    factor = bounded + shift if shift else bounded
    return factor, lambda g: g if limit is None else g.masked_fill_(up.abs() > limit, 0)


def _silu(x: Tensor, slope: float) -> tuple[Tensor, PullOne]:
    if slope == 1:
        return F.silu(x), lambda grad: torch.ops.aten.silu_backward(grad, x)
    sigmoid = torch.sigmoid(slope * x)
    return x * sigmoid, lambda grad: grad * (sigmoid * (1 + slope * x * (1 - sigmoid)))


def _gelu_tanh(x: Tensor, _: float) -> tuple[Tensor, PullOne]:
    value = F.gelu(x, approximate="tanh")
    return value, lambda grad: torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


def _relu2(x: Tensor, _: float) -> tuple[Tensor, PullOne]:
    root = F.relu(x)
    return root * root, lambda grad: grad * (2 * root)


def _situ(x: Tensor, _: float) -> tuple[Tensor, PullOne]:
    (value, slope), sigmoid = bent(x, 4.0), torch.sigmoid(x)
    return value * sigmoid, lambda grad: grad * (sigmoid * (slope + value * torch.sigmoid(-x)))


_FUNCTIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh, "relu2": _relu2, "situ": _situ}
