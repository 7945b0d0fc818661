"""Compares a written Hugging Face folder with what it was made of, before it gets its name.

The folder is read as an import reads it: config.json tells the model, the model its tensors' names,
and `HFSource` their values. Only the families' tables of names serve both ways: a mistake in one of
them is for `hf export --logits` to see, and for comparisons with other loaders.

Values are rounded once, to the type in which they are written, and must come back bit for bit.
They are compared by fingerprints: checksums of whole tensors, and of each expert of a stack as if
it were alone, so that an expert in another one's place is named. All is streamed: a rank holds one
tensor, or of a stack some experts. The price is two passes over the bytes, at 5 GB a second on a
core.
"""

import json
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.checksums import box_sum
from titan_moe.checkpoint.hf.assets import CODE, ENDS, EOS, OUTDATED, with_ids
from titan_moe.checkpoint.hf.folder import INDEX, SINGLE, HFFolder, Read, dtype_of, opened
from titan_moe.checkpoint.hf.pieces import cut, whole
from titan_moe.checkpoint.hf.read import HFSource
from titan_moe.checkpoint.tensors import Chunk
from titan_moe.config.parse import flat_keys
from titan_moe.distributed.agreement import from_every_rank, on_every_rank, on_rank_zero
from titan_moe.distributed.boxes import Box
from titan_moe.models.hf import CONFIG, HFModel, differences, model_of, read_settings
from titan_moe.models.hf_settings import ROPE, text_of
from titan_moe.runtime.errors import RunError, listed

# Elements of a stack that are read at once, but for a larger expert: the allocator keeps memory of
# this size, where larger tensors get fresh pages each time.
LARGEST_BOX = 2**22
_ROPE_TABLES = {"rope_scaling", "rope_parameters"}

Sums = dict[tuple[str, int], int]
"""Fingerprints by our name and the number of the expert, 0 of a tensor that is no stack."""


@dataclass
class Original:
    """Holds what an export is made of, and fingerprints of what this rank has read of it."""

    model: HFModel
    types: Mapping[str, torch.dtype]
    """The types in which those of our tensors are written that have a place."""
    source: Read
    origin: Path | None
    """The folder of the published weights."""
    rest: Mapping[str, Any]
    """Further tensors, as `HFFolder.rest` returns them."""
    turn_ends: Collection[int]
    """Tokens that end a turn of a conversation, and so a text too."""
    rounded: Sums = field(default_factory=dict)

    def read(self, name: str, box: Box) -> Tensor:
        """Returns a whole tensor of ours, or whole experts of a stack, as it is written."""
        values = self.source(name, box).to(self.types[name])
        self.rounded |= _fingerprints(name, box, values)
        return values


def compare(folder: Path, original: Original, *, keeps_ends: bool, doing: str) -> None:
    """Raises RunError if a written folder is not what it was made of: an index that its files do
    not agree with, another value, a tied weight twice, or a key of config.json that was lost.
    Collective.

    Args:
        keeps_ends: as write_assets returns it, on rank 0.
    """
    on_rank_zero(lambda: _check_files(folder, original.model), doing=doing)
    on_rank_zero(lambda: _check_config(folder, original, keeps_ends), doing=doing)
    back = on_every_rank(lambda: HFFolder(folder), doing=doing)
    source = on_every_rank(lambda: HFSource(back, model_of(folder)), doing=doing)
    share = on_every_rank(lambda: _read_share(back, source, original), doing=doing)
    everyone = zip(*from_every_rank(lambda: (original.rounded, share), doing=doing), strict=True)
    wanted, found = (dict(ChainMap(*sums)) for sums in everyone)
    _refuse(_unlike(wanted, found))


def _refuse(lines: list[str]) -> None:
    if lines:
        what = listed(lines, most=4)
        raise RunError(f"what was written is not right, and nothing is left of it: {what}")


def is_stack(name: str) -> bool:
    """Tells whether a tensor of ours has experts along its first dim."""
    return ".experts." in name


def boxes(name: str, shape: tuple[int, ...]) -> Iterable[Box]:
    """The boxes that a tensor of ours is read in: all of it, or of a stack some experts at a time,
    as many as LARGEST_BOX elements hold."""
    return cut(shape, LARGEST_BOX) if is_stack(name) else [whole(shape)]


def _fingerprints(name: str, box: Box, values: Tensor) -> Sums:
    parts, first = (values.unbind(), box[0].start) if is_stack(name) else ((values,), 0)
    return {(name, number): _fingerprint(part) for number, part in enumerate(parts, first)}


def _fingerprint(values: Tensor) -> int:
    words = values.reshape(-1)
    if words.nbytes % 8 == 0:  # A sum over words is as sharp, and over fewer.
        words = words.view(torch.int64)
    shape = tuple(words.shape)
    return int(box_sum(words, Chunk("", whole(shape), shape, words.dtype)))


def _check_files(folder: Path, model: HFModel) -> None:
    """Raises RunError unless each tensor is in the one file that the index names, sizes add up, and
    no tied weight is there twice."""
    files = {path.name: opened(path) for path in folder.glob("*.safetensors")}
    held = {(name, file): stored for file in files for name, stored in files[file].items()}
    index: dict[str, Any] = {"weight_map": {name: SINGLE for name, _ in held}}
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_bytes())
        size = sum(prod(each.get_shape()) * dtype_of(each).itemsize for each in held.values())
        if (told := index["metadata"]["total_size"]) != size:
            _refuse([f"{INDEX} says {told} bytes, but the tensors have {size}"])
    unlike = held.keys() ^ index["weight_map"].items()
    twice = [name for name, _ in held if name in model.tied]
    _refuse([f"{INDEX} and {file} do not agree on {name}" for name, file in sorted(unlike)])
    _refuse([f"{name}, a tied weight, is there twice" for name in twice])


def _check_config(folder: Path, original: Original, keeps_ends: bool) -> None:
    """Raises RunError unless config.json is of this model, and keeps all keys of the published one
    that do not follow from the model."""
    model, theirs, written = original.model, model_of(folder), read_settings(folder)
    lines = [f"{CONFIG}: {line}" for line in differences(model.config, theirs.config)]
    settings = {} if original.origin is None else read_settings(original.origin)
    settings = dict(settings if model.wrapper is not None else text_of(settings))
    after, own = flat_keys(written), model.settings().keys() | OUTDATED | {CODE} - written.keys()
    free = (own if keeps_ends else own | {*ENDS}) - _ROPE_TABLES
    for key, value in flat_keys(settings).items():
        first, *inside = key.removeprefix("text_config.").split(".")
        value = with_ids(value, original.turn_ends) if first == EOS and value is not None else value
        is_rope = first in _ROPE_TABLES and not (inside and ROPE.isdisjoint(inside))
        may_differ = is_rope or first in free or (first in ENDS and value is None)
        if not may_differ and after.get(key) != value:
            lines.append(f"{CONFIG} has {key}={after.get(key)!r}, not {value!r} as published")
    _refuse(lines)


def _read_share(back: HFFolder, source: HFSource, original: Original) -> Sums:
    """Returns fingerprints of this rank's share of a written folder, a tied weight's once."""
    sums: Sums = {}
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for name in sorted(source.found.keys() - original.model.first_of_group)[mine]:
        shape = source.found[name].shape
        for box in boxes(name, shape):
            sums |= _fingerprints(name, box, source.read(name, box))
    rest = back.rest()
    for theirs in sorted(original.rest)[mine]:
        if theirs not in rest or not torch.equal(rest[theirs][()], original.rest[theirs][()]):
            _refuse([f"{theirs} is not as in {original.origin}"])
    return sums


def _unlike(wanted: Sums, found: Sums) -> list[str]:
    """Returns one line per tensor, or expert, that has not come back as it was."""
    experts = {(name, value): number for (name, number), value in wanted.items()}
    lines = []
    for name, number in sorted(wanted.keys() | found.keys()):
        value = found.get((name, number))
        if value != wanted.get((name, number)):
            what = f"{name}: expert {number}" if is_stack(name) else name
            other = None if value is None else experts.get((name, value))
            says = "has other values than the checkpoint, or another type"
            lines.append(f"{what} {says if other is None else f'has those of expert {other}'}")
    return lines
