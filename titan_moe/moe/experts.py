"""The routed experts of one layer, stacked: gated feed-forwards as three grouped GEMMs."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.kernels.grouped_mm import grouped_mm, spread_over_rows
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch import ExpertRows

_CLAMP_LIMIT, _CLAMP_ALPHA = 7.0, 1.702


class ExpertWeights(NamedTuple):
    """What runs on the rows: w1, w3 [E, F, D], w2 [E, D, F], b1, b3 [E, F] and b2 [E, D]."""

    w1: Tensor
    w2: Tensor
    w3: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    b3: Tensor | None = None


Activation = Callable[[Tensor, Tensor], Tensor]
Compute = Callable[[ExpertRows, ExpertWeights], Tensor]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202)."""
    return F.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's: both clamped to 7 (the gate from above only), silu with a slope of 1.702, up + 1
    (arXiv 2508.10925, section 2.2, and its published reference code)."""
    gate = gate.clamp(max=_CLAMP_LIMIT)
    up = up.clamp(-_CLAMP_LIMIT, _CLAMP_LIMIT)
    return gate * torch.sigmoid(_CLAMP_ALPHA * gate) * (up + 1)


def weighted_outputs(rows: ExpertRows, weights: ExpertWeights, activation: Activation) -> Tensor:
    """weight * (w2 activation(w1 x + b1, w3 x + b3) + b2) for each row of each expert: y_RD.

    The routing weight is applied before the second projection, where a row is F wide and in float32
    arithmetic anyway; the projection is linear, so this is exact. Rows past the last offset are
    neither read nor given a meaning.
    """
    hidden_RF = activation(*_gate_and_up(rows.x_RD, rows.offsets_E, weights))
    weights_R1 = rows.weights_R[:, None].to(hidden_RF.dtype)
    y_RD = grouped_mm(hidden_RF * weights_R1, weights.w2, rows.offsets_E)
    if weights.b2 is not None:
        y_RD = y_RD + spread_over_rows(weights.b2, rows.offsets_E, len(y_RD)) * weights_R1
    return y_RD


def weighted_inputs(rows: ExpertRows, weights: ExpertWeights, activation: Activation) -> Tensor:
    """w2 activation(w1 (weight * x) + b1, w3 (weight * x) + b3) + b2 likewise."""
    x_RD = rows.x_RD * rows.weights_R[:, None].to(rows.x_RD.dtype)
    hidden_RF = activation(*_gate_and_up(x_RD, rows.offsets_E, weights))
    return _project(hidden_RF, weights.w2, weights.b2, rows.offsets_E)


_ACTIVATIONS: dict[str, Activation] = {"swiglu": swiglu, "clamped_swiglu": clamped_swiglu}
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
            _WAYS[config.weights_scale], activation=_ACTIVATIONS[config.activation]
        )

    def forward(self, rows: ExpertRows) -> Tensor:
        weights = ExpertWeights(self.w1, self.w2, self.w3, self.b1, self.b2, self.b3)
        return self.compute(rows, weights)


def _gate_and_up(x_RD: Tensor, offsets_E: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    gate_RF = _project(x_RD, weights.w1, weights.b1, offsets_E)
    return gate_RF, _project(x_RD, weights.w3, weights.b3, offsets_E)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, offsets_E: Tensor) -> Tensor:
    y = grouped_mm(x, weight, offsets_E)
    return y if bias is None else y + spread_over_rows(bias, offsets_E, len(y))
