"""The optimizer: which parameters it updates how, and which decay."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from titan_moe.config.job_config import Optimizer
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
    members: dict[str, list[nn.Parameter]] = {MATRICES: [], "decay": [], "no_decay": []}
    for name, param in named_parameters:
        if not param.requires_grad:
            continue
        if config.name == "Muon" and is_hidden_matrix(name, param):
            members[MATRICES].append(param)
        else:
            members["decay" if decays(name, param) else "no_decay"].append(param)
    groups = [
        {
            "name": group,
            "params": params,
            "peak_lr": config.lr,
            "weight_decay": 0.0 if group == "no_decay" else config.weight_decay,
        }
        for group, params in members.items()
        if params
    ]
    return BUILDERS[config.name](groups, config, joined_group)


BUILDERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda groups, config, joined_group: Adam(groups, config),
    "Adam": lambda groups, config, joined_group: Adam(groups, config),
    "Muon": Muon,
}
"""Constructors by name. Arguments are the groups, the table of the configuration, and the function
that returns the process group of several joined axes."""


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
