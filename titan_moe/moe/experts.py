"""The routed experts of one layer, stacked: gated feed-forwards as three grouped GEMMs.

What an expert makes of a row between its projections is F wide several times over: silu(gate), its
product with up, that times the routing weight. All of it follows from gate, up and the weight, and
costs next to nothing beside the projections, so the backward makes it again: of each routed row
only x, gate and up are kept (`moe_act`, as Megatron-Core calls it; arXiv 2512.14080 keeps the
same).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.ops.grouped_mm import GroupedMM, add_bias, grouped_mm, grouped_mm_backward

_CLAMP_LIMIT, _CLAMP_ALPHA = 7.0, 1.702


class ExpertWeights(NamedTuple):
    """What runs on the rows: w1, w3 [E, F, D], w2 [E, D, F], b1, b3 [E, F] and b2 [E, D]."""

    w1: Tensor
    w2: Tensor
    w3: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    b3: Tensor | None = None


Compute = Callable[[ExpertRows, ExpertWeights, GroupedMM], Tensor]
Pull = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The gradient of the hidden rows, which it may overwrite -> those of gate and up."""


class Activation(NamedTuple):
    """A function of gate and up, as plain arithmetic that autograd is not to see."""

    hidden: Callable[[Tensor, Tensor], Tensor]
    """gate_RF, up_RF -> hidden_RF, in memory of its own."""
    hidden_and_pull: Callable[[Tensor, Tensor], tuple[Tensor, Pull]]
    """The same, in the backward."""


def expert_outputs(
    rows: ExpertRows,
    weights: ExpertWeights,
    multiply: GroupedMM,
    *,
    activation: Activation,
    scale_inputs: bool,
) -> Tensor:
    """The weighted output of its expert for each row, y_RD:

        weight * (w2 activation(w1 x + b1, w3 x + b3) + b2), or with `scale_inputs`
        w2 activation(w1 (weight * x) + b1, w3 (weight * x) + b3) + b2

    An output's routing weight is applied before the second projection, where a row is F wide and in
    float32 arithmetic anyway; the projection is linear, so this is exact. Rows past the last offset
    are neither read nor given a meaning.

    Args:
        multiply: `grouped_mm`, or a product in lower precision.
    """
    offsets_E = rows.offsets_E
    weights_R1 = rows.weights_R[:, None].to(rows.x_RD.dtype)
    before_R1, after_R1 = (weights_R1, None) if scale_inputs else (None, weights_R1)
    gate_RF, up_RF = projections(rows.x_RD, before_R1, weights.w1, weights.w3, offsets_E, multiply)
    gate_RF = add_bias(gate_RF, weights.b1, offsets_E)
    up_RF = add_bias(up_RF, weights.b3, offsets_E)
    y_RD = activated_projection(
        gate_RF, up_RF, after_R1, weights.w2, offsets_E, activation, multiply
    )
    return add_bias(y_RD, weights.b2, offsets_E, after_R1)


class Experts(nn.Module):
    """The stacked weights of all experts, as `ExpertWeights` names them.

    Two attributes are strategies, set once when the model is built: `grouped_mm` is the product of
    the projections, which quantisation sets; `compute` runs on the weights, and expert parallelism
    wraps it to hand over each rank's shard.
    """

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        num_experts, hidden_dim = config.num_experts, config.hidden_dim
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.b1 = self.b2 = self.b3 = None
        if config.projection_bias:
            self.b1 = nn.Parameter(torch.empty(num_experts, hidden_dim))
            self.b2 = nn.Parameter(torch.empty(num_experts, dim))
            self.b3 = nn.Parameter(torch.empty(num_experts, hidden_dim))
        self.grouped_mm: GroupedMM = grouped_mm
        self.compute: Compute = partial(
            expert_outputs,
            activation=ACTIVATIONS[config.activation],
            scale_inputs=config.weights_scale == "inputs",
        )

    def forward(self, rows: ExpertRows) -> Tensor:
        weights = ExpertWeights(self.w1, self.w2, self.w3, self.b1, self.b2, self.b3)
        return self.compute(rows, weights, self.grouped_mm)


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
