"""The routed experts of one layer, stacked: SwiGLU as three grouped GEMMs."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.kernels.grouped_mm import grouped_mm
from titan_moe.moe.dispatch import ExpertRows


def swiglu_experts(rows: ExpertRows, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """w2 (weight * silu(w1 x) * w3 x) for each row of each expert: y_RD.

    The routing weight is applied before the second projection, where a row is F wide and in float32
    arithmetic anyway; the projection is linear, so this is exact. Rows past the last offset are
    neither read nor given a meaning.
    """
    gate_RF = grouped_mm(rows.x_RD, w1, rows.offsets_E)
    up_RF = grouped_mm(rows.x_RD, w3, rows.offsets_E)
    hidden_RF = F.silu(gate_RF) * up_RF * rows.weights_R[:, None].to(gate_RF.dtype)
    return grouped_mm(hidden_RF, w2, rows.offsets_E)


class Experts(nn.Module):
    """`w1`, `w3` [E, F, D] and `w2` [E, D, F].

    `compute` is what runs on the weights; expert parallelism wraps it to hand over each rank's
    shard.
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.compute: Callable[[ExpertRows, Tensor, Tensor, Tensor], Tensor] = swiglu_experts

    def forward(self, rows: ExpertRows) -> Tensor:
        return self.compute(rows, self.w1, self.w2, self.w3)
