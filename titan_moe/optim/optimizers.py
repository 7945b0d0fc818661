"""The optimizer: which parameters it updates how, and which decay."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from titan_moe.config.job_config import OPTIMIZER_KEYS, Optimizer
from titan_moe.models.decoder import is_bias
from titan_moe.optim.adam import Adam
from titan_moe.optim.muon import MATRICES, JoinedGroup, Muon, matrix_cut

# Muon is for what maps hidden states to hidden states, as its author has it: lookup tables, the
# output layer and gates, whose rows are single tokens or experts, and convolutions of single
# channels stay with AdamW.
_NOT_HIDDEN = {"tok_embeddings", "output", "router", "gate", "gates", "weights_proj", "conv"}


def build_optimizer(
    config: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    joined_group: JoinedGroup | None = None,
) -> torch.optim.Optimizer:
    """One optimizer over the trainable parameters, in the groups "decay" and "no_decay", and under
    Muon "matrices" before them.

    Each group carries its "name" and its "peak_lr", which set_lr scales. A group without parameters
    is left out. Parameters may be DTensors of different meshes, but no longer on the meta device.
    `joined_group`: returns the process group of several joined axes, which Muon exchanges over.

    The routing bias has no gradient and is no parameter: `train_step.TrainStep` moves it before
    each step, and a loop of one's own calls `moe.router.update_routers`.
    """
    trainable = [(name, param) for name, param in named_parameters if param.requires_grad]
    members: dict[str, list[nn.Parameter]] = {MATRICES: [], "decay": [], "no_decay": []}
    for name, param in trainable:
        if config.name == "Muon" and is_hidden_matrix(name, param):
            members[MATRICES].append(param)
        else:
            members["decay" if decays(name, param) else "no_decay"].append(param)
    weight_decay = {"no_decay": 0.0}
    groups = [
        {
            "name": group,
            "params": params,
            "peak_lr": config.lr,
            "weight_decay": weight_decay.get(group, config.weight_decay),
        }
        for group, params in members.items()
        if params
    ]
    keys = {key: getattr(config, key) for key in OPTIMIZER_KEYS[config.name]}
    if config.name == "Muon":
        keys["joined_group"] = joined_group
    return BUILDERS[config.name](groups, lr=config.lr, **keys)


def _adam(
    groups: list[dict[str, Any]],
    *,
    optimizer: Callable[..., Adam] = Adam,
    decoupled: bool = True,
    beta1: float,
    beta2: float,
    implementation: str,
    state_dtype: str,
    **others: Any,
) -> Adam:
    return optimizer(
        groups,
        decoupled=decoupled,
        betas=(beta1, beta2),
        implementation=implementation,
        state_dtype=torch.bfloat16 if state_dtype == "bfloat16" else None,
        **others,
    )


def _muon(
    groups: list[dict[str, Any]],
    *,
    muon_momentum: float,
    muon_steps: int,
    muon_dtype: str,
    muon_rms: float,
    joined_group: JoinedGroup | None,
    **adam: Any,
) -> Adam:
    muon = partial(
        Muon,
        momentum=muon_momentum,
        num_steps=muon_steps,
        dtype=muon_dtype,
        rms=muon_rms,
        joined_group=joined_group,
    )
    return _adam(groups, optimizer=muon, **adam)


BUILDERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": _adam,
    "Adam": partial(_adam, decoupled=False),
    "Muon": _muon,
}
"""Constructors by name. Arguments are the groups, the learning rate and the keys in OPTIMIZER_KEYS;
Muon gets the joined groups too."""


def make_joined_groups(
    config: Optimizer, parameters: Mapping[str, nn.Parameter], joined_group: JoinedGroup
) -> None:
    """Asks for the groups of joined axes that updates exchange over. Collective.

    Args:
        parameters: this rank's, by name.
    """
    for name, parameter in parameters.items():
        if config.name == "Muon" and is_hidden_matrix(name, parameter):
            matrix_cut(parameter, joined_group)


def decays(name: str, param: nn.Parameter) -> bool:
    """Weight decay is for matrices: not for norm weights, and not for biases of any shape."""
    return param.ndim > 1 and not is_bias(name)


def is_hidden_matrix(name: str, param: nn.Parameter) -> bool:
    """Returns whether Muon updates a parameter: a layer's weight or a stack of experts' weights."""
    return decays(name, param) and not _NOT_HIDDEN & set(name.split("."))
