"""The routed experts of one layer, stacked: feed-forwards as three grouped GEMMs, two if not gated.

Between its projections an expert makes several values of a row that are F wide: silu(gate), its
product with up, that times the routing weight. All of them follow from gate, up and the weight, and
costs next to nothing beside the projections, so the backward makes them again: of each routed row
only x, gate and up are kept (`moe_act`, as Megatron-Core calls it; arXiv 2512.14080 keeps the
same).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.ops.activation import Activation
from titan_moe.ops.gated import Activated, gated_rows, gated_rows_backward
from titan_moe.ops.grouped_mm import (
    GroupedMM,
    add_bias,
    grouped_mm,
    grouped_mm_backward,
    grouped_mm_grad_rows,
    grouped_mm_grad_weights,
)
from titan_moe.ops.linear import linear

ExpertWeights = Mapping[str, Tensor]
"""The experts' weights by the names of the parameters of `Experts`: w1, w3 [E, F, D], w2 [E, D, F];
with biases b1, b3 [E, F] and b2 [E, D]; with adapters adapter.w13_a, ... (`ExpertAdapter`). Without
w3, b3 and w3_b where the activation is not gated."""


class ExpertAdapter(nn.Module):
    """The weights of low-rank adapters (arXiv 2106.09685) of stacked experts, for `Experts`.

    w13_a [E, r, D] is shared by w1_b and w3_b [E, F, r], as `peft` adapts the two in one fused
    weight; w2_a [E, r, F] and w2_b [E, D, r].
    """

    def __init__(
        self, rank: int, num_experts: int, hidden_dim: int, dim: int, *, gated: bool = True
    ) -> None:
        super().__init__()
        self.w13_a = nn.Parameter(torch.empty(num_experts, rank, dim))
        self.w1_b = nn.Parameter(torch.empty(num_experts, hidden_dim, rank))
        self.w3_b = nn.Parameter(torch.empty(num_experts, hidden_dim, rank)) if gated else None
        self.w2_a = nn.Parameter(torch.empty(num_experts, rank, hidden_dim))
        self.w2_b = nn.Parameter(torch.empty(num_experts, dim, rank))

    def extra_repr(self) -> str:
        return f"rank={self.w13_a.shape[1]}"


class ExpertOutputs(nn.Module):
    """Computes the weighted output of each row's expert, y_RD:

        weight * (w2 activation(w1 x + b1, w3 x + b3) + b2), or with `scale_inputs`
        w2 activation(w1 (weight * x) + b1, w3 (weight * x) + b3) + b2

    An output's routing weight is applied before the second projection, where a row is F wide and in
    float32 arithmetic anyway; the projection is linear, so this is exact. Rows past the last offset
    are neither read nor given a meaning.

    `multiply` is a strategy: the product of the projections, another one in float8.
    """

    def __init__(
        self, activation: Activation, *, scale_inputs: bool, multiply: GroupedMM = grouped_mm
    ) -> None:
        super().__init__()
        self.activation, self.scale_inputs, self.multiply = activation, scale_inputs, multiply

    def extra_repr(self) -> str:
        return f"{self.activation}, {self.multiply.__name__}"

    def forward(self, rows: ExpertRows, weights: ExpertWeights) -> Tensor:
        offsets_E, multiply, w = rows.offsets_E, self.multiply, weights
        weights_R1 = rows.weights_R[:, None]
        # Inputs are scaled by a pass of torch, which would copy all rows for a wider factor.
        before_R1 = weights_R1.to(rows.x_RD.dtype) if self.scale_inputs else None
        after_R1 = None if self.scale_inputs else weights_R1
        stacks = w["w1"], w.get("w3"), offsets_E, multiply, rows.again_RD
        gate_RF, up_RF = projections(rows.x_RD, before_R1, *stacks)
        gate_RF = add_bias(gate_RF, w.get("b1"), offsets_E)
        if up_RF is not None:
            up_RF = add_bias(up_RF, w.get("b3"), offsets_E)
        if multiply is grouped_mm:
            inputs, last = (gate_RF, up_RF, after_R1), (w["w2"], offsets_E)
            link_RD = _KeptOperands.apply(*inputs, *last, self.activation)
            # The gradients of the product are those of `_KeptOperands`.
            y_RD = linear(
                link_RD,
                lambda _: grouped_mm(gated_rows(*inputs, self.activation), *last),
                lambda grad_RD: grad_RD,
            )
        else:
            hidden_RF = Activated.apply(gate_RF, up_RF, after_R1, self.activation)
            y_RD = multiply(hidden_RF, w["w2"], offsets_E)
        return add_bias(y_RD, w.get("b2"), offsets_E, after_R1)


class AdaptedOutputs(ExpertOutputs):
    """Computes the outputs of experts whose weights are w + scale * w_b w_a.

    Beside gate and up, the rows before w2 are kept for the backward: F more values of a row.
    """

    def __init__(self, activation: Activation, *, scale_inputs: bool, scale: float) -> None:
        super().__init__(activation, scale_inputs=scale_inputs)
        self.scale = scale

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale:g}"

    def forward(self, rows: ExpertRows, weights: ExpertWeights) -> Tensor:
        offsets_E, w = rows.offsets_E, weights
        weights_R1 = rows.weights_R[:, None]
        after_R1 = None if self.scale_inputs else weights_R1
        x_RD = rows.x_RD * weights_R1.to(rows.x_RD.dtype) if self.scale_inputs else rows.x_RD

        def product(x_RD: Tensor, low_Rr: Tensor, name: str) -> Tensor:
            y_RD = grouped_mm(x_RD, w[name], offsets_E)
            return y_RD + grouped_mm(low_Rr, w[f"adapter.{name}_b"], offsets_E)

        low_Rr = self.scale * grouped_mm(x_RD, w["adapter.w13_a"], offsets_E)
        gate_RF = add_bias(product(x_RD, low_Rr, "w1"), w.get("b1"), offsets_E)
        up_RF = None
        if "w3" in w:
            up_RF = add_bias(product(x_RD, low_Rr, "w3"), w.get("b3"), offsets_E)
        hidden_RF = Activated.apply(gate_RF, up_RF, after_R1, self.activation)
        low_Rr = self.scale * grouped_mm(hidden_RF, w["adapter.w2_a"], offsets_E)
        return add_bias(product(hidden_RF, low_Rr, "w2"), w.get("b2"), offsets_E, after_R1)


def projections(
    x_RD: Tensor,
    weights_R1: Tensor | None,
    w1_EFD: Tensor,
    w3_EFD: Tensor | None,
    offsets_E: Tensor,
    multiply: GroupedMM = grouped_mm,
    again_RD: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """multiply(weights * x, w) for w1 and for w3: gate_RF and up_RF. With `grouped_mm` keeps x, not
    the weighted rows. Another product keeps its operands for the backward as it needs them.

    again_RD: x for w3, if that has a tensor of its own (`gather_rows_twice`).
    """
    if weights_R1 is not None:
        if multiply is grouped_mm:
            return _ScaledProjections.apply(x_RD, weights_R1, w1_EFD, w3_EFD, offsets_E)
        x_RD, again_RD = x_RD * weights_R1, None
    again_RD = x_RD if again_RD is None else again_RD
    up_RF = None if w3_EFD is None else multiply(again_RD, w3_EFD, offsets_E)
    return multiply(x_RD, w1_EFD, offsets_E), up_RF


class _KeptOperands(torch.autograd.Function):
    """Keeps what the gradients of the last projection follow from, before its product is computed:
    a recomputation of a layer ends here. Keeps no hidden rows.

    Returns one element in the shape of the product, with strides of 0, which links the two. In a
    split backward the products of both gradients run twice: one function makes both.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        gate_RF: Tensor,
        up_RF: Tensor | None,
        weights_R1: Tensor | None,
        w2_EDF: Tensor,
        offsets_E: Tensor,
        activation: Activation,
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
        grad_w2_EDF = None
        if ctx.needs_input_grad[3]:
            grad_w2_EDF = grouped_mm_grad_weights(grad_RD, grads.hidden_RF, w2_EDF, offsets_E)
        return grads.gate_RF, grads.up_RF, grads.weights_R1, grad_w2_EDF, None, None


class _ScaledProjections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x_RD: Tensor,
        weights_R1: Tensor,
        w1_EFD: Tensor,
        w3_EFD: Tensor | None,
        offsets_E: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x_RD, weights_R1, w1_EFD, w3_EFD, offsets_E)  # type: ignore[arg-type]
        return projections(x_RD * weights_R1, None, w1_EFD, w3_EFD, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_gate_RF: Tensor, grad_up_RF: Tensor):  # type: ignore[override, no-untyped-def]
        x_RD, weights_R1, w1_EFD, w3_EFD, offsets_E = ctx.saved_tensors
        scaled_RD, grad_w3_EFD = x_RD * weights_R1, None
        _, _, *trains, _ = ctx.needs_input_grad
        gate, up = ((scaled_RD, w_EFD, offsets_E) for w_EFD in (w1_EFD, w3_EFD))
        grad_RD, grad_w1_EFD = grouped_mm_backward(grad_gate_RF, *gate, (True, trains[0]))
        if w3_EFD is not None:
            other_RD, grad_w3_EFD = grouped_mm_backward(grad_up_RF, *up, (True, trains[1]))
            grad_RD.add_(other_RD)
        grad_weights_R1 = torch.mul(grad_RD, x_RD, out=scaled_RD).sum(-1, keepdim=True)
        return grad_RD.mul_(weights_R1), grad_weights_R1, grad_w1_EFD, grad_w3_EFD, None
