"""How evenly each MoE layer's tokens are spread over its experts."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def expert_load(counts_LE: Tensor, layers: Sequence[str]) -> dict[str, float]:
    """Load figures of each MoE layer, under "moe/<name>/".

    - "max_over_mean": rows of the busiest expert over the mean: 1 is even, E is collapse.
    - "cv": coefficient of variation, the standard deviation over the mean.
    - "entropy": of the load, over ln E: 1 is even, 0 is collapse.
    - "dead": experts without a single row.

    A layer without any row reads 0, 0, 0 and E.

    Args:
        counts_LE: rows per MoE layer and expert over the whole job. One host sync for all layers.
        layers: the name of each of the L layers, such as layers.3.
    """
    num_experts = counts_LE.shape[1]
    load_LE = counts_LE.double()
    mean_L = load_LE.mean(1)
    divisor_L = mean_L.clamp(min=1 / num_experts)  # Only a layer without rows lies below.
    share_LE = load_LE / (divisor_L * num_experts)[:, None]
    figures = {
        "max_over_mean": load_LE.amax(1) / divisor_L,
        "cv": load_LE.std(1, correction=0) / divisor_L,
        "entropy": torch.special.entr(share_LE).sum(1) / math.log(max(num_experts, 2)),
        "dead": (counts_LE == 0).sum(1).double(),
    }
    rows = torch.stack(list(figures.values()), dim=1).tolist()
    return {
        f"moe/{layer}/{name}": value
        for layer, row in zip(layers, rows, strict=True)
        for name, value in zip(figures, row, strict=True)
    }
