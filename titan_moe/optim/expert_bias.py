"""What the MoE layers learn from a step's counts: the routing bias and the load that was."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.moe.balance import updated_bias
from titan_moe.moe.layer import MoE


def take_counts(
    moe_layers: Mapping[str, MoE],
    all_layers: Sequence[str],
    *,
    num_experts: int,
    device: torch.device,
) -> Tensor:
    """Tokens per expert over the whole world since the last call, and start anew: counts_LE.

    A row for each of `all_layers`, on whichever rank it is. One all-reduce for all of them;
    collective over all ranks, those without MoE layers included.
    """
    counts_LE = torch.zeros(len(all_layers), num_experts, dtype=torch.int64, device=device)
    for row, name in enumerate(all_layers):
        if name in moe_layers:
            counts_E = moe_layers[name].router.tokens_per_expert
            counts_LE[row] = counts_E
            counts_E.zero_()
    dist.all_reduce(counts_LE)
    return counts_LE


@torch.no_grad()
def update_routers(
    moe_layers: Mapping[str, MoE], all_layers: Sequence[str], counts_LE: Tensor
) -> None:
    """Move each layer's routing bias towards an even load, and remember the load.

    Called before the optimizer step, once for all of its microbatches. `counts_LE` has a row for
    each of `all_layers`; those of other ranks are left to them.
    """
    for name, counts_E in zip(all_layers, counts_LE, strict=True):
        if name not in moe_layers:
            continue
        moe = moe_layers[name]
        router = moe.router
        router.previous_load.copy_(counts_E / counts_E.sum())
        if moe.config.bias_update_speed:
            bias_E = updated_bias(router.expert_bias, counts_E, moe.config.bias_update_speed)
            router.expert_bias.copy_(bias_E)
