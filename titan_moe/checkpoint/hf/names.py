"""Finds our tensors in a Hugging Face folder, and the names under which they are exported."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from titan_moe.checkpoint.hf.folder import HFFolder
from titan_moe.checkpoint.hf.pieces import Stored
from titan_moe.checkpoint.manifest import listed
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.hf import HFModel, model_of
from titan_moe.models.hf_family import HFWeight
from titan_moe.runtime.errors import RunError

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]
"""Our names -> the shapes of whole tensors."""

PREVIOUS_LOAD = ".router.previous_load"
EXPERT_BIAS = ".router.expert_bias"
_INDEXER = ".indexer."

_LAYER = re.compile(r"^(mtp\.)?layers\.(\d+)\.")


def find(model: HFModel, folder: HFFolder, shapes: Shapes) -> dict[str, Stored]:
    """The place of each of our tensors in a folder; those that are never stored are left out, and
    indexers that are to warm up if the folder has none.

    Raises RunError that names every missing, superfluous or misshapen tensor.
    """
    indexer = model.config.indexer
    if indexer is not None and indexer.warm_up and not any(_INDEXER in x for x in folder.shapes):
        logger.info("%s has no indexers: they begin with random weights", folder.path)
        shapes = {name: shape for name, shape in shapes.items() if _INDEXER not in name}
    places: dict[str, Stored] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if ways := [Stored(name, shape, way) for way in _ways(model, name)]:
            # The first of those that the folder has most of.
            places[name] = max(ways, key=lambda way: _share(way, folder))
            wanted |= places[name].tensors()
    unused = [name for name in folder.shapes if name not in wanted]
    problems = {
        "missing": sorted(wanted.keys() - folder.shapes.keys()),
        "of no use to this model": sorted(_without_expected(unused, model, folder)),
        "of another shape": [
            f"{name} {list(folder.shapes[name])} (wanted {list(shape)})"
            for name, shape in wanted.items()
            if folder.shapes.get(name, shape) != shape
        ],
    }
    lines = [
        f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} {kind}: {listed(names)}"
        for kind, names in problems.items()
        if names
    ]
    if lines:
        raise RunError(f"{folder.path} does not fit the model: {'; '.join(lines)}")
    return places


def write_as(model: HFModel, shapes: Shapes) -> dict[str, list[Stored]]:
    """The form in which each of our tensors is published, and its published copies.

    Raises RunError for a tensor that has no place; the routing's bias and load need none.
    """
    targets: dict[str, list[Stored]] = {}
    for name, shape in shapes.items():
        if name not in model.first_of_group and (ways := _ways(model, name)):
            targets[name] = [Stored(name, shape, ways[0])]
    first = model.config.num_layers
    for copy, ours in model.copies.items():
        source = model.first_of_group.get(ours, ours)
        for layer in range(first, first + model.config.num_mtp_layers):
            way = HFWeight(copy.replace("{layer}", str(layer)))
            targets[source].append(Stored(source, shapes[source], way))
    return targets


def model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters and persistent buffers by name, as a checkpoint of the model has them."""
    with torch.device("meta"):
        model = Decoder(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def has_place(model: HFModel, name: str) -> bool:
    """Returns whether the Hugging Face form has a place for one of our tensors."""
    pattern, _ = _pattern(model, model.first_of_group.get(name, name))
    return pattern in model.keys


def _ways(model: HFModel, name: str) -> list[HFWeight]:
    """All ways, with the layer's number; none for what needs no place. Raises RunError."""
    if name.endswith(PREVIOUS_LOAD):
        return []
    pattern, layer = _pattern(model, model.first_of_group.get(name, name))
    ways = model.keys.get(pattern, ())
    if not ways and not name.endswith(EXPERT_BIAS):
        raise RunError(f"{name} has no place in the Hugging Face form of {model.family}")
    return [replace(way, name=way.name.replace("{layer}", str(layer))) for way in ways]


def _pattern(model: HFModel, name: str) -> tuple[str, int]:
    match = _LAYER.match(name)
    if match is None:
        return name, 0
    mtp, number = match[1] or "", int(match[2])
    layer = number + (model.config.num_layers if mtp else 0)
    return f"{mtp}layers.{{layer}}.{name[match.end() :]}", layer


def _share(stored: Stored, folder: HFFolder) -> float:
    tensors = stored.tensors()
    return sum(name in folder.shapes for name in tensors) / len(tensors)


def _without_expected(names: list[str], model: HFModel, folder: HFFolder) -> list[str]:
    """Names but for copies, ignored ones, and layers that only multi-token prediction has."""
    config = model.config
    theirs = model_of(folder.path).config
    layers = range(config.num_layers, config.num_layers + theirs.num_mtp_layers)
    prefixes = {way.name.partition("{layer}")[0] for ways in model.keys.values() for way in ways}
    own_mtp = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    expected = {
        copy.replace("{layer}", str(layer)) for copy in model.copies for layer in own_mtp
    } | {way.name for ours in model.first_of_group for way in model.keys.get(ours, ())}
    rest, ahead = [], 0
    for name in names:
        match = re.match(r"(.*?layers\.)(\d+)\.", name)
        beyond = match is not None and match[1] in prefixes and int(match[2]) in layers
        if beyond and match is not None and int(match[2]) not in own_mtp:
            ahead += 1
        elif name not in expected and not any(fnmatchcase(name, p) for p in model.ignored):
            rest.append(name)
    if ahead:
        logger.info("%d tensors of multi-token prediction layers are left out", ahead)
    return rest
