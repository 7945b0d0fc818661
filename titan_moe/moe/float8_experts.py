"""Experts whose projections are other products than `grouped_mm`, such as float8 ones."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.moe.activation import ACTIVATIONS, Activation
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.moe.experts import ExpertWeights
from titan_moe.moe.layer import MoE
from titan_moe.ops.grouped_bias import add_bias

GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


def multiply_with(moe: MoE, multiply: GroupedProduct) -> None:
    """Let a layer's experts multiply with something else, before expert parallelism cuts them.

    Args:
        multiply: as `grouped_mm`, differentiable.
    """
    moe.experts.compute = partial(
        _outputs,
        activation=ACTIVATIONS[moe.config.activation],
        scale_inputs=moe.config.weights_scale == "inputs",
        multiply=multiply,
    )


def _outputs(
    rows: ExpertRows,
    weights: ExpertWeights,
    *,
    activation: Activation,
    scale_inputs: bool,
    multiply: GroupedProduct,
) -> Tensor:
    """As `weighted_outputs` or `weighted_inputs`.

    The operands of a product are kept for the backward as its `multiply` wants them; of the
    activation gate and up are, from which it is computed again.
    """
    x_RD, offsets_E = rows.x_RD, rows.offsets_E
    weights_R1 = rows.weights_R[:, None].to(x_RD.dtype)
    if scale_inputs:
        x_RD = x_RD * weights_R1
    gate_RF = _with_bias(multiply(x_RD, weights.w1, offsets_E), weights.b1, offsets_E)
    up_RF = _with_bias(multiply(x_RD, weights.w3, offsets_E), weights.b3, offsets_E)
    hidden_RF = _Activated.apply(gate_RF, up_RF, activation)
    if scale_inputs:
        return _with_bias(multiply(hidden_RF, weights.w2, offsets_E), weights.b2, offsets_E)
    y_RD = multiply(hidden_RF * weights_R1, weights.w2, offsets_E)
    return _with_bias(y_RD, weights.b2, offsets_E, weights_R1)


def _with_bias(
    y: Tensor, bias: Tensor | None, offsets_E: Tensor, weights_R1: Tensor | None = None
) -> Tensor:
    return y if bias is None else add_bias(y, bias, offsets_E, weights_R1)


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
