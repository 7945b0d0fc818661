"""What the MoE layers learn from a step's counts: the routing bias and the load that was."""

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.moe.balance import updated_bias
from titan_moe.moe.layer import MoE


def take_counts(moe_layers: list[MoE]) -> Tensor:
    """Tokens per expert over the whole world since the last call, and start anew: counts_LE.

    One all-reduce for all layers; collective over all ranks.
    """
    counts_LE = torch.stack([moe.router.tokens_per_expert for moe in moe_layers])
    for moe in moe_layers:
        moe.router.tokens_per_expert.zero_()
    dist.all_reduce(counts_LE)
    return counts_LE


@torch.no_grad()
def update_routers(moe_layers: list[MoE], counts_LE: Tensor) -> None:
    """Move each layer's routing bias towards an even load, and remember the load.

    Called before the optimizer step, once for all of its microbatches.
    """
    for moe, counts_E in zip(moe_layers, counts_LE, strict=True):
        router = moe.router
        router.previous_load.copy_(counts_E / counts_E.sum())
        if moe.config.bias_update_speed:
            bias_E = updated_bias(router.expert_bias, counts_E, moe.config.bias_update_speed)
            router.expert_bias.copy_(bias_E)
