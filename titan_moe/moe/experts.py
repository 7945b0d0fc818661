"""The routed experts of one layer, stacked: gated feed-forwards as three grouped GEMMs.

Between its projections an expert makes several values of a row that are F wide: silu(gate), its
product with up, that times the routing weight. All of them follow from gate, up and the weight, and
costs next to nothing beside the projections, so the backward makes them again: of each routed row
only x, gate and up are kept (`moe_act`, as Megatron-Core calls it; arXiv 2512.14080 keeps the
same).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.ops.gated import gated_rows, gated_rows_backward
from titan_moe.ops.grouped_mm import (
    GroupedMM,
    add_bias,
    grouped_mm,
    grouped_mm_backward,
    grouped_mm_grad_rows,
    grouped_mm_grad_weights,
)


class ExpertWeights(NamedTuple):
    """Holds the experts' weights: w1, w3 [E, F, D], w2 [E, D, F], b1, b3 [E, F] and b2 [E, D]."""

    w1: Tensor
    w2: Tensor
    w3: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    b3: Tensor | None = None


Compute = Callable[[ExpertRows, ExpertWeights, GroupedMM], Tensor]


def expert_outputs(
    rows: ExpertRows,
    weights: ExpertWeights,
    multiply: GroupedMM,
    *,
    activation: str,
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
    weights_R1 = rows.weights_R[:, None]
    # Inputs are scaled by a pass of torch, which would copy all rows for a wider factor.
    before_R1 = weights_R1.to(rows.x_RD.dtype) if scale_inputs else None
    after_R1 = None if scale_inputs else weights_R1
    gate_RF, up_RF = projections(rows.x_RD, before_R1, weights.w1, weights.w3, offsets_E, multiply)
    gate_RF = add_bias(gate_RF, weights.b1, offsets_E)
    up_RF = add_bias(up_RF, weights.b3, offsets_E)
    y_RD = activated_projection(
        gate_RF, up_RF, after_R1, weights.w2, offsets_E, activation, multiply
    )
    return add_bias(y_RD, weights.b2, offsets_E, after_R1)


class RowsInParts(NamedTuple):
    """Parts of a microbatch that travel apart, so that one does while the experts compute another.

    An argument of one call of `Experts`, whose gathered weights serve all parts.
    """

    sent: list[Any]
    """Results of `Dispatcher.send`, one for each part."""
    receive: Callable[[Any, int], ExpertRows]
    """A part on its way, and its number -> its rows."""
    send_back: Callable[[Tensor, int], Any]
    """Outputs for these rows, and the part's number -> outputs on their way back."""

    def through(self, compute: Callable[[ExpertRows], Tensor]) -> list[Any]:
        """Receive a part, compute it, send it back, and go on to the next one."""
        return [
            self.send_back(compute(self.receive(sent, part)), part)
            for part, sent in enumerate(self.sent)
        ]


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
            activation=config.activation,
            scale_inputs=config.weights_scale == "inputs",
        )

    def forward(self, rows: ExpertRows | RowsInParts) -> Any:
        weights = ExpertWeights(self.w1, self.w2, self.w3, self.b1, self.b2, self.b3)
        if isinstance(rows, RowsInParts):
            return rows.through(lambda part: self.compute(part, weights, self.grouped_mm))
        return self.compute(rows, weights, self.grouped_mm)


def activated_projection(
    gate_RF: Tensor,
    up_RF: Tensor,
    weights_R1: Tensor | None,
    w2_EDF: Tensor,
    offsets_E: Tensor,
    activation: str,
    multiply: GroupedMM = grouped_mm,
) -> Tensor:
    """multiply(weights * activation(gate, up), w2): y_RD. With `grouped_mm` keeps no hidden rows.

    In a split backward the products of both gradients run twice: one function makes both.
    """
    if multiply is grouped_mm:
        operands = gate_RF, up_RF, weights_R1, w2_EDF, offsets_E
        return _Projection.apply(_KeptOperands.apply(*operands, activation), operands, activation)
    hidden_RF = _Activated.apply(gate_RF, up_RF, weights_R1, activation)
    return multiply(hidden_RF, w2_EDF, offsets_E)


def projections(
    x_RD: Tensor,
    weights_R1: Tensor | None,
    w1_EFD: Tensor,
    w3_EFD: Tensor,
    offsets_E: Tensor,
    multiply: GroupedMM = grouped_mm,
) -> tuple[Tensor, Tensor]:
    """multiply(weights * x, w) for w1 and for w3: gate_RF and up_RF. With `grouped_mm` keeps x, not
    the weighted rows. Another product keeps its operands for the backward as it needs them.
    """
    if weights_R1 is not None:
        if multiply is grouped_mm:
            return _ScaledProjections.apply(x_RD, weights_R1, w1_EFD, w3_EFD, offsets_E)
        x_RD = x_RD * weights_R1
    return multiply(x_RD, w1_EFD, offsets_E), multiply(x_RD, w3_EFD, offsets_E)


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, gate_RF: Tensor, up_RF: Tensor, weights_R1: Tensor | None, activation: str
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


class _KeptOperands(torch.autograd.Function):
    """Keeps what the gradients of `activated_projection` follow from, before its product is
    computed: a recomputation of a layer ends here.

    Returns one element in the shape of the product, with strides of 0, which links the two.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        gate_RF: Tensor,
        up_RF: Tensor,
        weights_R1: Tensor | None,
        w2_EDF: Tensor,
        offsets_E: Tensor,
        activation: str,
    ) -> Tensor:
        ctx.save_for_backward(gate_RF, up_RF, weights_R1, w2_EDF, offsets_E)  # type: ignore[arg-type]
        ctx.activation = activation  # type: ignore[attr-defined]
        return gate_RF.new_empty_strided((len(gate_RF), w2_EDF.shape[1]), (0, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        gate_RF, up_RF, weights_R1, w2_EDF, offsets_E = ctx.saved_tensors
        grad_RD = grad_RD.contiguous()
        grad_RF = grouped_mm_grad_rows(grad_RD, w2_EDF, offsets_E)
        grads = gated_rows_backward(grad_RF, gate_RF, up_RF, weights_R1, ctx.activation)
        grad_w2_EDF = grouped_mm_grad_weights(grad_RD, grads.hidden_RF, w2_EDF, offsets_E)
        return grads.gate_RF, grads.up_RF, grads.weights_R1, grad_w2_EDF, None, None


class _Projection(torch.autograd.Function):
    """The product; its gradients are those of `_KeptOperands`, whose result is `link_RD`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, link_RD: Tensor, operands: tuple[Any, ...], activation: str
    ) -> Tensor:
        gate_RF, up_RF, weights_R1, w2_EDF, offsets_E = operands
        return grouped_mm(gated_rows(gate_RF, up_RF, weights_R1, activation), w2_EDF, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        return grad_RD, None, None


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
