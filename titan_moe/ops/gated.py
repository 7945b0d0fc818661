"""The gated activations between an expert's projections, times its routing weights.

In plain torch each is a chain of elementwise passes over rows that are F wide; on CUDA the chain is
one Triton kernel forward and one backward. While a graph is traced the plain form stays, which the
compiler fuses itself. Routing weights may be wider than the rows: the kernels multiply with them as
they are, and plain torch, each of whose passes rounds, rounds them too.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.ops.operation import with_kernel

Pull = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Takes the gradient of the hidden rows, which it may overwrite; returns those of gate and up."""


class Activation(NamedTuple):
    """A function of gate and up in plain arithmetic, which autograd does not record."""

    hidden_and_pull: Callable[[Tensor, Tensor], tuple[Tensor, Pull]]
    """gate_RF, up_RF -> hidden_RF, in memory of its own, and the function that its backward needs.
    """
    clamp: tuple[float, float] | None
    """Limit and slope of the clamped activation; None for silu(gate) * up."""


class GatedGradients(NamedTuple):
    """Holds the gradients of the inputs of `gated_rows`, and its recomputed result."""

    gate_RF: Tensor
    up_RF: Tensor
    weights_R1: Tensor | None
    hidden_RF: Tensor
    """Recomputed result; not a gradient."""


@with_kernel("gated_triton")
def gated_rows(
    gate_RF: Tensor, up_RF: Tensor, weights_R1: Tensor | None, activation: str
) -> Tensor:
    """Returns hidden_RF: activation(gate, up), times each row's weight if there are weights.

    Args:
        activation: a key of `ACTIVATIONS`.
    """
    # Not in place: a compiled autograd function of torch 2.11 that returns what it wrote into has
    # gradients of zero.
    hidden_RF, _ = ACTIVATIONS[activation].hidden_and_pull(gate_RF, up_RF)
    return hidden_RF if weights_R1 is None else hidden_RF * weights_R1.to(hidden_RF.dtype)


@with_kernel("gated_triton")
def gated_rows_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weights_R1: Tensor | None, activation: str
) -> GatedGradients:
    """Computes gradients from that of `gated_rows`'s result, which it may overwrite."""
    hidden_RF, pull = ACTIVATIONS[activation].hidden_and_pull(gate_RF, up_RF)
    grad_weights_R1 = None
    if weights_R1 is not None:
        grad_weights_R1 = (hidden_RF * grad_RF).sum(-1, keepdim=True).to(weights_R1.dtype)
        weights_R1 = weights_R1.to(hidden_RF.dtype)
        hidden_RF.mul_(weights_R1)
        grad_RF.mul_(weights_R1)
    return GatedGradients(*pull(grad_RF), grad_weights_R1, hidden_RF)


def _swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, Pull]:
    silu = F.silu(gate)

    def pull(grad: Tensor) -> tuple[Tensor, Tensor]:
        grad_up = silu.mul_(grad)
        return torch.ops.aten.silu_backward(grad.mul_(up), gate), grad_up

    return silu * up, pull


_LIMIT, _SLOPE = 7.0, 1.702


def _clamped_swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, Pull]:
    low = gate.clamp(max=_LIMIT)
    up_1 = up.clamp(-_LIMIT, _LIMIT) + 1
    sigmoid = torch.sigmoid(_SLOPE * low)
    silu = low * sigmoid

    def pull(grad: Tensor) -> tuple[Tensor, Tensor]:
        slope = sigmoid * (1 + _SLOPE * low * (1 - sigmoid))
        grad_gate = (grad * up_1 * slope).masked_fill_(gate > _LIMIT, 0)
        return grad_gate, (grad * silu).masked_fill_(up.abs() > _LIMIT, 0)

    return silu * up_1, pull


ACTIVATIONS = {
    # silu(gate) * up (arXiv 2002.05202).
    "swiglu": Activation(_swiglu, None),
    # gpt-oss's: both clamped to 7 (the gate from above only), silu with a slope of 1.702, up + 1
    # (arXiv 2508.10925, section 2.2, and its published reference code).
    "clamped_swiglu": Activation(_clamped_swiglu, (_LIMIT, _SLOPE)),
}
