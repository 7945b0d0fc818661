"""The routed experts of one layer, stacked: gated feed-forwards as three grouped GEMMs."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_moe.moe.activation import (
    ACTIVATIONS,
    Activation,
    activated_projection,
    scaled_projections,
)
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.ops.grouped_bias import add_bias
from titan_moe.ops.grouped_mm import grouped_mm


class ExpertWeights(NamedTuple):
    """What runs on the rows: w1, w3 [E, F, D], w2 [E, D, F], b1, b3 [E, F] and b2 [E, D]."""

    w1: Tensor
    w2: Tensor
    w3: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    b3: Tensor | None = None


Compute = Callable[[ExpertRows, ExpertWeights], Tensor]


def weighted_outputs(rows: ExpertRows, weights: ExpertWeights, activation: Activation) -> Tensor:
    """weight * (w2 activation(w1 x + b1, w3 x + b3) + b2) for each row of each expert: y_RD.

    The routing weight is applied before the second projection, where a row is F wide and in float32
    arithmetic anyway; the projection is linear, so this is exact. Rows past the last offset are
    neither read nor given a meaning.
    """
    x_RD, offsets_E = rows.x_RD, rows.offsets_E
    weights_R1 = rows.weights_R[:, None].to(x_RD.dtype)
    gate_RF = _with_bias(grouped_mm(x_RD, weights.w1, offsets_E), weights.b1, offsets_E)
    up_RF = _with_bias(grouped_mm(x_RD, weights.w3, offsets_E), weights.b3, offsets_E)
    y_RD = activated_projection(gate_RF, up_RF, weights_R1, weights.w2, offsets_E, activation)
    return _with_bias(y_RD, weights.b2, offsets_E, weights_R1)


def weighted_inputs(rows: ExpertRows, weights: ExpertWeights, activation: Activation) -> Tensor:
    """w2 activation(w1 (weight * x) + b1, w3 (weight * x) + b3) + b2 likewise."""
    x_RD, offsets_E = rows.x_RD, rows.offsets_E
    weights_R1 = rows.weights_R[:, None].to(x_RD.dtype)
    gate_RF, up_RF = scaled_projections(x_RD, weights_R1, weights.w1, weights.w3, offsets_E)
    gate_RF = _with_bias(gate_RF, weights.b1, offsets_E)
    up_RF = _with_bias(up_RF, weights.b3, offsets_E)
    y_RD = activated_projection(gate_RF, up_RF, None, weights.w2, offsets_E, activation)
    return _with_bias(y_RD, weights.b2, offsets_E)


_WAYS = {"outputs": weighted_outputs, "inputs": weighted_inputs}


class Experts(nn.Module):
    """The stacked weights of all experts, as `ExpertWeights` names them.

    `compute` is what runs on the weights; expert parallelism wraps it to hand over each rank's
    shard.
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
        self.compute: Compute = partial(
            _WAYS[config.weights_scale], activation=ACTIVATIONS[config.activation]
        )

    def forward(self, rows: ExpertRows) -> Tensor:
        weights = ExpertWeights(self.w1, self.w2, self.w3, self.b1, self.b2, self.b3)
        return self.compute(rows, weights)


def _with_bias(
    y: Tensor, bias: Tensor | None, offsets_E: Tensor, weights_R1: Tensor | None = None
) -> Tensor:
    return y if bias is None else add_bias(y, bias, offsets_E, weights_R1)
