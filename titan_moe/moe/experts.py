"""The routed experts of one layer, stacked: gated feed-forwards as three grouped GEMMs."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_moe.moe.activation import ACTIVATIONS, Activation, activated_projection, projections
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.ops.grouped_mm import GroupedMM, add_bias, grouped_mm


class ExpertWeights(NamedTuple):
    """What runs on the rows: w1, w3 [E, F, D], w2 [E, D, F], b1, b3 [E, F] and b2 [E, D]."""

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
