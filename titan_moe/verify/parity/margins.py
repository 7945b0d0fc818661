"""How near a model's routing comes to a tie, which correct computations may break differently."""

from collections.abc import Callable

import torch
from torch import Tensor

from titan_moe.models.decoder import Decoder
from titan_moe.moe.router import Router


def watch_margins(model: Decoder, margins: list[float]) -> None:
    """Append each routing decision's margin: the distance between the last score chosen and the
    first one rejected, of experts and of their groups, smallest over tokens."""
    for moe in model.moe_layers().values():
        moe.routing_fn = _watched(moe.router, margins)


def _watched(router: Router, margins: list[float]) -> Callable[[Tensor], Tensor]:
    select, config = router.select_experts, router.config

    def watched(scores_TE: Tensor) -> Tensor:
        biased_TE = scores_TE.detach() + router.expert_bias
        if config.num_groups > 1:
            biased_TGE = biased_TE.unflatten(-1, (config.num_groups, -1))
            groups_TG = biased_TGE.topk(config.group_score_top, dim=-1).values.sum(-1)
            margins.append(_margin(groups_TG, config.top_groups))
            least_T1 = groups_TG.topk(config.top_groups, dim=-1).values[:, -1:]
            out_TG1 = (groups_TG < least_T1)[..., None]
            biased_TE = biased_TGE.masked_fill(out_TG1, float("-inf")).flatten(1)
        margins.append(_margin(biased_TE, config.top_k))
        return select(scores_TE)

    return watched


def _margin(scores_TE: Tensor, top: int) -> float:
    if top == scores_TE.shape[1]:
        return float("inf")
    best = torch.topk(scores_TE, top + 1, dim=-1).values
    return (best[:, top - 1] - best[:, top]).min().item()
