"""The optimizer: which parameters decay, and how torch runs the update."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from titan_moe.config.optimization import Optimizer
from titan_moe.models.decoder import is_bias

_CLASSES: dict[str, type[torch.optim.Adam]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
}
_FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}


def build_optimizer(
    config: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """One optimizer over the trainable parameters, in the groups "decay" and "no_decay".

    Each group carries its "name" and its "peak_lr", which set_lr scales. A group without parameters
    is left out. Parameters may be DTensors of different meshes, but no longer on the meta device.
    An implementation of "fused" becomes "foreach" on devices that torch has no fused kernel for.
    """
    trainable = [(name, param) for name, param in named_parameters if param.requires_grad]
    members: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": []}
    for name, param in trainable:
        members["decay" if decays(name, param) else "no_decay"].append(param)
    weight_decay = {"decay": config.weight_decay, "no_decay": 0.0}
    groups = [
        {
            "name": group,
            "params": params,
            "peak_lr": config.lr,
            "weight_decay": weight_decay[group],
        }
        for group, params in members.items()
        if params
    ]
    return _CLASSES[config.name](
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        **_implementation(config, {param.device.type for _, param in trainable}),
    )


def decays(name: str, param: nn.Parameter) -> bool:
    """Weight decay is for matrices: not for norm weights, and not for biases of any shape."""
    return param.ndim > 1 and not is_bias(name)


def _implementation(config: Optimizer, device_types: set[str]) -> dict[str, Any]:
    fused = config.implementation == "fused" and device_types <= _FUSED_DEVICES
    return {"fused": fused, "foreach": not fused and config.implementation != "for-loop"}
