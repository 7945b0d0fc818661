"""The optimizer: which parameters it updates how, and which decay."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from titan_moe.config.job_config import Optimizer, OptimizerGroup
from titan_moe.distributed.agreement import from_every_rank
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import is_bias
from titan_moe.models.trained import means
from titan_moe.optim.adam import Adam
from titan_moe.optim.muon import MATRICES, JoinedGroup, Muon, matrix_cut

# Muon is for what maps hidden states to hidden states, as its author has it: lookup tables, the
# output layer and gates, whose rows are single tokens or experts, and convolutions of single
# channels stay with AdamW.
_NOT_HIDDEN = {"tok_embeddings", "output", "router", "gate", "gates", "weights_proj", "conv"}


def build_optimizer(
    config: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    model: ModelConfig,
    joined_group: JoinedGroup | None = None,
) -> torch.optim.Optimizer:
    """One optimizer over the trainable parameters, in the groups "decay" and "no_decay", and under
    Muon "matrices" before them. optimizer.groups split those whose parameters they name.

    Each group carries its "name", its "kind" and its "peak_lr", which set_lr scales. A group
    without parameters is left out. Parameters may be DTensors of different meshes, but no longer on
    the meta device.
    `joined_group`: returns the process group of several joined axes, which Muon exchanges over.

    The routing bias has no gradient and is no parameter: `train_step.TrainStep` moves it before
    each step, and a loop of one's own calls `moe.router.update_routers`.
    """
    kinds = MATRICES, "decay", "no_decay"
    asked = [*config.groups, OptimizerGroup(pattern="*")]
    members: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
    for name, param in named_parameters:
        if not param.requires_grad:
            continue
        kind = 1 if decays(name, param) else 2
        if config.name == "Muon" and is_hidden_matrix(name, param):
            kind = 0
        place = next(at for at, group in enumerate(asked) if means(group.pattern, name, model))
        members[kind, place].append(param)
    groups = []
    for (kind, place), params in sorted(members.items(), key=lambda item: item[0]):
        named, wanted = place < len(config.groups), asked[place]
        decay = config.weight_decay if wanted.weight_decay is None else wanted.weight_decay
        groups.append(
            {
                "name": f"{kinds[kind]}:{wanted.pattern}" if named else kinds[kind],
                "kind": kinds[kind],
                "params": params,
                "peak_lr": config.lr if wanted.lr is None else wanted.lr,
                "weight_decay": 0.0 if kinds[kind] == "no_decay" else decay,
            }
        )
    # torch wants a group, also on a stage of a pipeline where nothing trains.
    nothing = {"name": "decay", "kind": "decay", "params": [], "peak_lr": config.lr}
    return BUILDERS[config.name](groups or [nothing], config, joined_group)


def peak_rates(optimizer: torch.optim.Optimizer, config: Optimizer) -> dict[str, float]:
    """Returns the peak learning rate of each group by name, of all ranks' groups: a stage of a
    pipeline may have no parameter of one. Collective."""
    rates = {group["name"]: group["peak_lr"] for group in optimizer.param_groups}
    if not config.groups:
        return rates
    everyone = from_every_rank(lambda: rates, doing="cannot gather learning rates")
    return {name: rate for each in everyone for name, rate in each.items()}


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
