"""What the MoE layers learn from a step's counts: the routing bias and the load that was.

All layers together: a few launches a step, however many layers there are.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titan_moe.moe.balance import updated_bias
from titan_moe.moe.layer import MoE


def own_counts(
    moe_layers: Mapping[str, MoE],
    all_layers: Sequence[str],
    *,
    num_experts: int,
    device: torch.device,
) -> Tensor:
    """Tokens per expert that this rank has counted since the last call, and start anew: counts_LE.

    A row for each of `all_layers`; zeros for those of other ranks. To be summed over the world.
    """
    counts = {name: moe.router.tokens_per_expert for name, moe in moe_layers.items()}
    nothing = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts_LE = torch.stack([counts.get(name, nothing) for name in all_layers])
    if counts:
        torch._foreach_zero_(list(counts.values()))
    return counts_LE


@torch.no_grad()
def update_routers(
    moe_layers: Mapping[str, MoE], all_layers: Sequence[str], counts_LE: Tensor
) -> None:
    """Move each layer's routing bias towards an even load, and remember the load.

    Called before the optimizer step, once for all of its microbatches. `counts_LE` has a row for
    each of `all_layers`; those of other ranks are left to them.
    """
    rows = [row for row, name in enumerate(all_layers) if name in moe_layers]
    if not rows:
        return
    layers = [moe_layers[all_layers[row]] for row in rows]
    if len(rows) < len(all_layers):
        counts_LE = torch.stack([counts_LE[row] for row in rows])
    loads_LE = counts_LE / counts_LE.sum(-1, keepdim=True)
    loads = [layer.router.previous_load for layer in layers]
    torch._foreach_copy_(loads, list(loads_LE.to(loads[0].dtype).unbind()))
    if speed := layers[0].config.bias_update_speed:
        biases = [layer.router.expert_bias for layer in layers]
        moved_LE = updated_bias(torch.stack(biases), counts_LE, speed)
        torch._foreach_copy_(biases, list(moved_LE.unbind()))
