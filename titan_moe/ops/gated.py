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

CLAMP_LIMIT, CLAMP_SLOPE = 7.0, 1.702

Pull = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The gradient of the hidden rows, which it may overwrite -> those of gate and up."""


class Activation(NamedTuple):
    """A function of gate and up, as plain arithmetic that autograd is not to see."""

    hidden: Callable[[Tensor, Tensor], Tensor]
    """gate_RF, up_RF -> hidden_RF, in memory of its own."""
    hidden_and_pull: Callable[[Tensor, Tensor], tuple[Tensor, Pull]]
    """gate_RF, up_RF -> hidden_RF, and the function that its backward needs."""


class GatedGradients(NamedTuple):
    """Holds the gradients of the inputs of `gated_rows`, and its recomputed result."""

    gate_RF: Tensor
    up_RF: Tensor
    weights_R1: Tensor | None
    hidden_RF: Tensor
    """Recomputed result; not a gradient."""


def gated_rows(
    gate_RF: Tensor, up_RF: Tensor, weights_R1: Tensor | None, activation: str
) -> Tensor:
    """activation(gate, up), times each row's weight if there are weights: hidden_RF.

    Args:
        activation: of `ACTIVATIONS`.
    """
    if _runs_triton(gate_RF):
        # Imported here: a CPU run has no Triton and no use for it.
        from titan_moe.ops import gated_triton

        return gated_triton.gated_rows(gate_RF, up_RF, weights_R1, activation)
    return gated_rows_reference(gate_RF, up_RF, weights_R1, activation)


def gated_rows_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weights_R1: Tensor | None, activation: str
) -> GatedGradients:
    """Computes gradients from that of `gated_rows`'s result, which it may overwrite."""
    if _runs_triton(grad_RF):
        from titan_moe.ops import gated_triton

        backward = gated_triton.gated_rows_backward
    else:
        backward = gated_rows_backward_reference
    return GatedGradients(*backward(grad_RF, gate_RF, up_RF, weights_R1, activation))


def gated_rows_reference(
    gate_RF: Tensor, up_RF: Tensor, weights_R1: Tensor | None, activation: str
) -> Tensor:
    """`gated_rows` in plain torch."""
    hidden_RF = ACTIVATIONS[activation].hidden(gate_RF, up_RF)
    return hidden_RF if weights_R1 is None else hidden_RF.mul_(weights_R1.to(hidden_RF.dtype))


def gated_rows_backward_reference(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weights_R1: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The fields of GatedGradients, in plain torch."""
    hidden_RF, pull = ACTIVATIONS[activation].hidden_and_pull(gate_RF, up_RF)
    grad_weights_R1 = None
    if weights_R1 is not None:
        grad_weights_R1 = (hidden_RF * grad_RF).sum(-1, keepdim=True).to(weights_R1.dtype)
        weights_R1 = weights_R1.to(hidden_RF.dtype)
        hidden_RF.mul_(weights_R1)
        grad_RF.mul_(weights_R1)
    return *pull(grad_RF), grad_weights_R1, hidden_RF


def _runs_triton(x: Tensor) -> bool:
    return x.is_cuda and not torch.compiler.is_compiling()


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


def _swiglu_and_pull(gate: Tensor, up: Tensor) -> tuple[Tensor, Pull]:
    silu = F.silu(gate)

    def pull(grad: Tensor) -> tuple[Tensor, Tensor]:
        grad_up = silu.mul_(grad)
        return torch.ops.aten.silu_backward(grad.mul_(up), gate), grad_up

    return silu * up, pull


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _clamped_swiglu_and_pull(gate, up)[0]


def _clamped_swiglu_and_pull(gate: Tensor, up: Tensor) -> tuple[Tensor, Pull]:
    low = gate.clamp(max=CLAMP_LIMIT)
    up_1 = up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT) + 1
    sigmoid = torch.sigmoid(CLAMP_SLOPE * low)
    silu = low * sigmoid

    def pull(grad: Tensor) -> tuple[Tensor, Tensor]:
        slope = sigmoid * (1 + CLAMP_SLOPE * low * (1 - sigmoid))
        grad_gate = (grad * up_1 * slope).masked_fill_(gate > CLAMP_LIMIT, 0)
        return grad_gate, (grad * silu).masked_fill_(up.abs() > CLAMP_LIMIT, 0)

    return silu * up_1, pull


ACTIVATIONS = {
    # silu(gate) * up (arXiv 2002.05202).
    "swiglu": Activation(_swiglu, _swiglu_and_pull),
    # gpt-oss's: both clamped to 7 (the gate from above only), silu with a slope of 1.702, up + 1
    # (arXiv 2508.10925, section 2.2, and its published reference code).
    "clamped_swiglu": Activation(_clamped_swiglu, _clamped_swiglu_and_pull),
}
