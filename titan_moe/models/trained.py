"""Chooses the parameters of a model that train: by patterns of names, adapters, warm-up."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from titan_moe.config.job_config import Lora, OptimizerGroup, Training
from titan_moe.models.config import ModelConfig, matches, tied_weights
from titan_moe.models.decoder import ADAPTER, Decoder
from titan_moe.models.lora import adaptable, empty_model
from titan_moe.models.stats import Size


def unknown_patterns(
    config: ModelConfig, training: Training, lora: Lora, groups: Sequence[OptimizerGroup]
) -> list[str]:
    """Returns a line for each pattern of training.freeze, optimizer.groups and lora.targets that
    matches nothing in the model; and one where nothing is left to train."""
    layers = list(adaptable(empty_model(config)))
    names = _names(config, lora)
    # A family may lack some of the layers that are adapted unless others are named.
    named = lora.rank is not None and lora.targets != Lora().targets
    asked = (
        ("training.freeze", training.freeze, names),
        ("optimizer.groups.pattern", [group.pattern for group in groups], names),
        ("lora.targets", lora.targets if named else [], layers),
    )
    kinds = {"lora.targets": "no layer that can have an adapter"}
    lines = [
        f"{key}={pattern} matches {kinds.get(key, 'nothing')} in this model: "
        f"{_nearest(pattern, known)}"
        for key, patterns, known in asked
        for pattern in patterns
        if not any(means(pattern, name, config) for name in known)
    ]
    if not lines and not trained(names, config, training, lora):
        adapted = f"lora.targets={','.join(lora.targets)} and " * (lora.rank is not None)
        frozen = ",".join(training.freeze)
        lines = [f"{adapted}training.freeze={frozen} leave nothing that trains: freeze less"]
    return lines


def _nearest(pattern: str, names: Sequence[str]) -> str:
    parts = sorted({part for name in names for part in name.split(".") if not part.isdecimal()})
    near = get_close_matches(pattern, parts) or get_close_matches(pattern, names)
    return f"nearest are {', '.join(near)}" if near else f"a name in it is {names[0]}"


def trained(names: Iterable[str], config: ModelConfig, training: Training, lora: Lora) -> set[str]:
    """Returns the names, among these, of the parameters that train.

    While indexers warm up, they alone train; in a model with adapters, the adapters alone.
    training.freeze removes the parameters that it names.
    """
    names = set(names)
    if config.indexer is not None and training.indexer_stage == "dense":
        names = {name for name in names if ".indexer." in name}
    if config.sparse is not None:  # Its indexers' selection has no gradient.
        names = {name for name in names if ".indexer." not in name}
    if lora.rank is not None:
        names = {name for name in names if ADAPTER in name}
    frozen = training.freeze
    return {name for name in names if not any(means(each, name, config) for each in frozen)}


def means(pattern: str, name: str, config: ModelConfig) -> bool:
    """Returns whether a pattern names a parameter, by any of its names if it is tied. A pattern for
    the block that a copy stands in, such as "mtp", does not mean the copy."""
    (tied,) = [group for group in tied_weights(config) if name in group] or [[name]]
    blocks = {each: each.rpartition(".tok_embeddings.")[0] for each in tied[1:]}
    return any(
        matches(each, pattern) and not (blocks.get(each) and matches(blocks[each], pattern))
        for each in tied
    )


def pattern_lines(
    config: ModelConfig, training: Training, lora: Lora, groups: Sequence[OptimizerGroup]
) -> list[str]:
    """Returns a line for each pattern of training.freeze and optimizer.groups, with the parameters
    that it takes. A group takes no frozen parameter and none of an earlier group."""
    names, lines = _names(config, lora), []
    trains = trained(names, config, training, lora)
    for pattern in training.freeze:
        taken = [name for name in names if means(pattern, name, config)]
        lines.append(f"training.freeze={pattern} freezes {_listed(taken)}")
    for group in groups:
        taken = [name for name in names if name in trains and means(group.pattern, name, config)]
        trains -= {*taken}
        lines.append(f"optimizer.groups.pattern={group.pattern} takes {_listed(taken)}")
    return lines


def _listed(names: Iterable[str]) -> str:
    """Lists names once for all numbers in them, as "layers.*.w1", with how many names there are."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "nothing"


def _names(config: ModelConfig, lora: Lora) -> list[str]:
    return [name for name, _ in empty_model(config, lora).named_parameters()]


def sizes_by_name(
    config: ModelConfig, training: Training, lora: Lora
) -> tuple[dict[str, Size], dict[str, Size]]:
    """Returns the sizes of a model with its adapters, and those of its trained parameters: each by
    the parts of `stats.part_sizes`."""
    named = dict(empty_model(config, lora).named_parameters())
    trains = trained(named, config, training, lora)
    found: tuple[dict[str, Size], dict[str, Size]] = {}, {}
    for name, parameter in named.items():
        first, second, *_ = name.split(".")
        part = f"layers.{second}" if first == "layers" else first
        for sizes, counts in zip(found, (True, name in trains), strict=True):
            number = parameter.numel() * counts
            dense, routed = sizes.get(part, Size(0))
            is_routed = ".experts." in name
            sizes[part] = Size(dense + number * (not is_routed), routed + number * is_routed)
    return found


def freeze(model: Decoder, training: Training, lora: Lora) -> None:
    """Turns off gradients of the parameters that do not train, in a model or a stage of one."""
    named = dict(model.named_parameters())
    trains = trained(named, model.config, training, lora)
    for name, parameter in named.items():
        parameter.requires_grad_(name in trains)
