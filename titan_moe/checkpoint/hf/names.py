"""Finds our tensors in a Hugging Face folder, and the names under which they are exported."""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

from titan_moe.checkpoint.hf.folder import HFFolder
from titan_moe.checkpoint.hf.pieces import Stored, cut
from titan_moe.config.job_config import Lora
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import HFModel, model_of, wrapper_of
from titan_moe.models.hf_names import HFWeight
from titan_moe.models.lora import empty_model
from titan_moe.runtime.errors import RunError, listed

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]
"""Our names -> the shapes of whole tensors."""

PREVIOUS_LOAD = ".router.previous_load"
EXPERT_BIAS = ".router.expert_bias"
TABLE = ".router.table"
_INDEXER = ".indexer."
# Parts of names that transformers 5 has in files alone: in memory a layer has another name.
_FILES_ALONE = ("{expert}", "backbone.", "block_sparse_moe.", "self_attn.f_", ".attn.", ".ffn.")

_COMPARED = 2**24  # Elements of two tensors that are compared at once.
_LAYER = re.compile(r"^(mtp\.)?layers\.(\d+)\.")


def find(model: HFModel, folder: HFFolder) -> dict[str, Stored]:
    """The place of each of the model's tensors in a folder; those that are never stored are left
    out, and indexers that are to warm up if the folder has none.

    Raises RunError that names every missing, superfluous or misshapen tensor, and a stored copy of
    another tensor that is not equal to it.
    """
    model = replace(model, wrapper=wrapper_of(folder.settings))
    shapes, indexer = model_shapes(model.config), model.config.indexer
    if indexer is not None and indexer.warm_up and not any(_INDEXER in x for x in folder.shapes):
        logger.info("%s has no indexers: they begin with random weights", folder.path)
        shapes = {name: shape for name, shape in shapes.items() if _INDEXER not in name}
    places: dict[str, Stored] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if ways := [Stored(name, shape, way) for way in _ways(model, name)]:
            places[name] = _nearest(ways, folder.shapes)
            wanted |= places[name].tensors()
    unused = [name for name in folder.shapes if name not in wanted]
    compare_shapes(folder.path, folder.shapes, wanted, _without_expected(unused, model, folder))
    _refuse_other_copies(model, folder, places)
    return places


def compare_shapes(folder: Path, found: Shapes, wanted: Shapes, unused: Iterable[str]) -> None:
    """Raises RunError that names every missing, superfluous or misshapen tensor of a folder."""
    problems = {
        "missing": sorted(wanted.keys() - found.keys()),
        "of no use to this model": sorted(unused),
        "of another shape": [
            f"{name} {list(found[name])} (wanted {list(shape)})"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ],
    }
    lines = [
        f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} {kind}: {listed(names)}"
        for kind, names in problems.items()
        if names
    ]
    if lines:
        raise RunError(f"{folder} does not fit the model: {'; '.join(lines)}")


def write_as(
    model: HFModel, shapes: Shapes, stored: Shapes = MappingProxyType({})
) -> dict[str, list[Stored]]:
    """The form in which each of our tensors is published, and its published copies.

    Args:
        stored: shapes of their tensors by name: each of ours takes the form that has most of them.

    Raises RunError for a tensor that has no place; the routing's bias and load need none.
    """
    targets: dict[str, list[Stored]] = {}
    for name, shape in shapes.items():
        if name not in model.first_of_group and (ways := _ways(model, name)):
            targets[name] = [_nearest([Stored(name, shape, way) for way in ways], stored)]
    for copy, ours in model.copies.items():
        targets[ours].append(Stored(ours, shapes[ours], HFWeight(copy)))
    return targets


def way_in_memory(model: HFModel, name: str) -> HFWeight:
    """The way in which a model of transformers 5 holds a tensor of ours: experts as stacks."""
    ways = _ways(model, name)
    return next(way for way in ways if not any(part in way.name for part in _FILES_ALONE))


def model_shapes(config: ModelConfig, lora: Lora | None = None) -> dict[str, tuple[int, ...]]:
    """Parameters, with those of adapters if there are some, and persistent buffers by name."""
    state = empty_model(config, lora).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _ways(model: HFModel, name: str) -> list[HFWeight]:
    """Returns the ways in which a tensor of ours may be stored, with its layer's number; none for
    one that is never stored. Raises RunError for one that cannot be stored."""
    if name.endswith(PREVIOUS_LOAD):
        return []
    pattern = whole = model.first_of_group.get(name, name)
    layer = 0
    if match := _LAYER.match(pattern):
        mtp, number = match[1] or "", int(match[2])
        layer = number + (model.config.num_layers if mtp else 0)
        pattern = f"{mtp}layers.{{layer}}.{pattern[match.end() :]}"
    ways = model.keys.get(whole, model.keys.get(pattern, ()))  # A layer may have its own.
    if not ways and not name.endswith(EXPERT_BIAS):
        raise RunError(f"{name} has no place in the Hugging Face form of {model.family}")
    return [replace(way, name=way.name.replace("{layer}", str(layer))) for way in ways]


def _nearest(ways: list[Stored], shapes: Shapes) -> Stored:
    """The first of the ways in which most tensors are stored in these shapes, or at all."""

    def share(way: Stored) -> tuple[float, float]:
        tensors = way.tensors()
        fitting = sum(shapes.get(name) == shape for name, shape in tensors.items())
        return fitting / len(tensors), len(tensors.keys() & shapes.keys()) / len(tensors)

    return max(ways, key=share)


def _without_expected(names: list[str], model: HFModel, folder: HFFolder) -> list[str]:
    """Names but for copies, ignored ones, and layers that only multi-token prediction has."""
    first, own = model.config.num_layers, model.config.num_mtp_layers
    theirs = model_of(folder.path).config.num_mtp_layers
    layers, copies = range(first + own, first + theirs), model.copies | model.tied
    prefixes = {way.name.partition("{layer}")[0] for ways in model.keys.values() for way in ways}
    expected = {
        "of multi-token prediction layers are left out": [
            f"{prefix}{layer}.*" for prefix in prefixes for layer in layers
        ],
        "are not trained": model.ignored,
    }
    rest = [name for name in names if name not in copies]
    for says, patterns in expected.items():
        if left := [x for x in rest if any(fnmatchcase(x, pattern) for pattern in patterns)]:
            logger.info("%d tensors %s: %s", len(left), says, listed(left))
        rest = [name for name in rest if name not in left]
    return rest


def _refuse_other_copies(model: HFModel, folder: HFFolder, places: Mapping[str, Stored]) -> None:
    """Raises RunError for a stored copy with other values, which would not be read. Each rank
    compares its share: together they read each copy, and what it must equal, once."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for name, ours in (model.copies | model.tied).items():
        if name not in folder.shapes:
            continue
        first, shape = places[ours].way.name, folder.shapes[name]
        boxes = list(cut(shape, _COMPARED))[rank::ranks] if name != first else []
        if shape == folder.shapes[first] and all(
            torch.equal(folder.read(name, box), folder.read(first, box)) for box in boxes
        ):
            continue
        remedy = "tie_word_embeddings=false in config.json to train both"
        if "layers." in name:
            remedy = "model.num_mtp_layers=0 to train without it"
        raise RunError(
            f"{folder.path}: {name} is not equal to {first}, whose values would take its place: "
            f"set {remedy}"
        )
