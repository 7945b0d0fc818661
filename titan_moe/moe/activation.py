"""Gated activations between the experts' projections, recomputed in the backward.

What an expert makes of a row between its projections is F wide several times over: silu(gate), its
product with up, that times the routing weight. All of it follows from gate, up and the weight, and
costs next to nothing beside the projections, so the backward makes it again: of each routed row
only x, gate and up are kept (`moe_act`, as Megatron-Core calls it; arXiv 2512.14080 keeps the
same).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.ops.grouped_mm import GroupedMM, grouped_mm, grouped_mm_backward

_CLAMP_LIMIT, _CLAMP_ALPHA = 7.0, 1.702

Pull = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The gradient of the hidden rows, which it may overwrite -> those of gate and up."""


class Activation(NamedTuple):
    """A function of gate and up, as plain arithmetic that autograd is not to see."""

    hidden: Callable[[Tensor, Tensor], Tensor]
    """gate_RF, up_RF -> hidden_RF, in memory of its own."""
    hidden_and_pull: Callable[[Tensor, Tensor], tuple[Tensor, Pull]]
    """The same, in the backward."""


def activated_projection(
    gate_RF: Tensor,
    up_RF: Tensor,
    weights_R1: Tensor | None,
    w2_EDF: Tensor,
    offsets_E: Tensor,
    activation: Activation,
    multiply: GroupedMM = grouped_mm,
) -> Tensor:
    """multiply(weights * activation(gate, up), w2): y_RD. With `grouped_mm` keeps no hidden rows.

    In a split backward the products of both gradients run twice: one function makes both.
    """
    if multiply is grouped_mm:
        return _ActivatedProjection.apply(gate_RF, up_RF, weights_R1, w2_EDF, offsets_E, activation)
    hidden_RF = _Activated.apply(gate_RF, up_RF, activation)
    if weights_R1 is not None:
        hidden_RF = hidden_RF * weights_R1
    return multiply(hidden_RF, w2_EDF, offsets_E)


def projections(
    x_RD: Tensor,
    weights_R1: Tensor | None,
    w1_EFD: Tensor,
    w3_EFD: Tensor,
    offsets_E: Tensor,
    multiply: GroupedMM = grouped_mm,
) -> tuple[Tensor, Tensor]:
    """multiply(weights * x, w) for w1 and for w3. With `grouped_mm` keeps x, not the weighted rows.

    Another product keeps its operands for the backward as it needs them.
    """
    if weights_R1 is not None:
        if multiply is grouped_mm:
            return _ScaledProjections.apply(x_RD, weights_R1, w1_EFD, w3_EFD, offsets_E)
        x_RD = x_RD * weights_R1
    return multiply(x_RD, w1_EFD, offsets_E), multiply(x_RD, w3_EFD, offsets_E)


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
    low = gate.clamp(max=_CLAMP_LIMIT)
    up_1 = up.clamp(-_CLAMP_LIMIT, _CLAMP_LIMIT) + 1
    sigmoid = torch.sigmoid(_CLAMP_ALPHA * low)
    silu = low * sigmoid

    def pull(grad: Tensor) -> tuple[Tensor, Tensor]:
        slope = sigmoid * (1 + _CLAMP_ALPHA * low * (1 - sigmoid))
        grad_gate = (grad * up_1 * slope).masked_fill_(gate > _CLAMP_LIMIT, 0)
        return grad_gate, (grad * silu).masked_fill_(up.abs() > _CLAMP_LIMIT, 0)

    return silu * up_1, pull


ACTIVATIONS = {
    # silu(gate) * up (arXiv 2002.05202).
    "swiglu": Activation(_swiglu, _swiglu_and_pull),
    # gpt-oss's: both clamped to 7 (the gate from above only), silu with a slope of 1.702, up + 1
    # (arXiv 2508.10925, section 2.2, and its published reference code).
    "clamped_swiglu": Activation(_clamped_swiglu, _clamped_swiglu_and_pull),
}


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate_RF: Tensor, up_RF: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate_RF, up_RF)
        ctx.activation = activation  # type: ignore[attr-defined]
        return activation.hidden(gate_RF, up_RF)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RF: Tensor):  # type: ignore[override, no-untyped-def]
        _, pull = ctx.activation.hidden_and_pull(*ctx.saved_tensors)
        return *pull(grad_RF.clone()), None


class _ActivatedProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        gate_RF: Tensor,
        up_RF: Tensor,
        weights_R1: Tensor | None,
        w2_EDF: Tensor,
        offsets_E: Tensor,
        activation: Activation,
    ) -> Tensor:
        ctx.save_for_backward(gate_RF, up_RF, weights_R1, w2_EDF, offsets_E)  # type: ignore[arg-type]
        ctx.activation = activation  # type: ignore[attr-defined]
        hidden_RF = activation.hidden(gate_RF, up_RF)
        if weights_R1 is not None:
            hidden_RF.mul_(weights_R1)
        return grouped_mm(hidden_RF, w2_EDF, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        gate_RF, up_RF, weights_R1, w2_EDF, offsets_E = ctx.saved_tensors
        hidden_RF, pull = ctx.activation.hidden_and_pull(gate_RF, up_RF)
        weighted_RF = hidden_RF if weights_R1 is None else hidden_RF * weights_R1
        grad_RF, grad_w2_EDF = grouped_mm_backward(grad_RD, weighted_RF, w2_EDF, offsets_E)
        del weighted_RF
        grad_weights_R1 = None
        if weights_R1 is not None:
            grad_weights_R1 = hidden_RF.mul_(grad_RF).sum(-1, keepdim=True)
            grad_RF.mul_(weights_R1)
        return *pull(grad_RF), grad_weights_R1, grad_w2_EDF, None, None


class _ScaledProjections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x_RD: Tensor,
        weights_R1: Tensor,
        w1_EFD: Tensor,
        w3_EFD: Tensor,
        offsets_E: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_RD, weights_R1, w1_EFD, w3_EFD, offsets_E)
        scaled_RD = x_RD * weights_R1
        return grouped_mm(scaled_RD, w1_EFD, offsets_E), grouped_mm(scaled_RD, w3_EFD, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_gate_RF: Tensor, grad_up_RF: Tensor):  # type: ignore[override, no-untyped-def]
        x_RD, weights_R1, w1_EFD, w3_EFD, offsets_E = ctx.saved_tensors
        scaled_RD = x_RD * weights_R1
        grad_RD, grad_w1_EFD = grouped_mm_backward(grad_gate_RF, scaled_RD, w1_EFD, offsets_E)
        other_RD, grad_w3_EFD = grouped_mm_backward(grad_up_RF, scaled_RD, w3_EFD, offsets_E)
        grad_RD.add_(other_RD)
        grad_weights_R1 = torch.mul(grad_RD, x_RD, out=other_RD).sum(-1, keepdim=True)
        return grad_RD.mul_(weights_R1), grad_weights_R1, grad_w1_EFD, grad_w3_EFD, None
