"""Compares a written Hugging Face folder with what it was made of, before it gets its name.

The folder is read as an import reads it: config.json tells the model, the model its tensors' names,
and `HFSource` their values. Only the families' tables of names serve both ways: a mistake in one of
them is for `hf export --logits` to see, and for comparisons with other loaders.

Values are rounded once, to the type in which they are written, and must come back bit for bit.
They are compared by fingerprints: checksums of whole tensors, and of each expert of a stack as if
it were alone, so that equal experts have equal ones. All is streamed: a rank holds one tensor, or
of a stack some experts.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from filecmp import cmp
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.checksums import box_sum
from titan_moe.checkpoint.hf.assets import CODE, ENDS, OUTDATED, Carried
from titan_moe.checkpoint.hf.folder import INDEX, SINGLE, HFFolder, dtype_of, opened
from titan_moe.checkpoint.hf.names import Shapes
from titan_moe.checkpoint.hf.pieces import cut, whole
from titan_moe.checkpoint.hf.read import HFSource
from titan_moe.checkpoint.tensors import Chunk
from titan_moe.config.parse import flat_keys
from titan_moe.distributed.agreement import from_every_rank, on_every_rank, on_rank_zero
from titan_moe.distributed.boxes import Box, sizes
from titan_moe.models.hf import CONFIG, HFModel, differences, model_of, read_settings
from titan_moe.models.hf_settings import ROPE, text_of
from titan_moe.runtime.errors import RunError, listed

_LARGEST_BOX = 2**26  # Elements of a stack that are read at once: 128 MB in bfloat16.
_ROPE_TABLES = ("rope_scaling", "rope_parameters")

Read = Callable[[str, Box], Tensor]
"""Reads a box of one of our tensors, on this rank."""
Sums = dict[tuple[str, int], int]
"""Fingerprints by our name and the number of the expert, 0 of a tensor that is no stack."""


class Original(NamedTuple):
    """What an export is made of."""

    model: HFModel
    shapes: Shapes
    """Of all our tensors, whole."""
    types: Mapping[str, torch.dtype]
    """The types in which those of our tensors are written that have a place."""
    read: Read
    origin: Path | None
    """The folder of the published weights."""
    rest: Mapping[str, object]
    """Further tensors, as `HFFolder.rest` returns them."""


class Fingerprints:
    """Reads our tensors for a writer, and keeps the fingerprints of what it has read: of whole
    tensors, or of whole experts of a stack."""

    def __init__(self, original: Original) -> None:
        self._original = original
        self.sums: Sums = {}

    def read(self, name: str, box: Box) -> Tensor:
        """Returns a box as it is, not rounded."""
        values = self._original.read(name, box)
        self.sums |= _fingerprints(name, box, values.to(self._original.types[name]))
        return values


def compare(
    folder: Path, original: Original, written: Sums, carried: Carried, *, doing: str
) -> None:
    """Raises RunError if a written folder is not what it was made of: an index that its files do
    not agree with, another value, a tied weight twice, experts that have become equal, a key of
    config.json or a file beside the weights that was lost. Collective.

    Args:
        written: this rank's fingerprints of what the folder was written from.
    """
    on_rank_zero(lambda: _check_files(folder), doing=doing)
    on_rank_zero(lambda: _check_beside(folder, original, carried), doing=doing)
    back = on_every_rank(lambda: HFFolder(folder), doing=doing)
    source = on_every_rank(lambda: HFSource(back, model_of(folder)), doing=doing)
    _refuse(_tied_twice(back, original.model))
    found: Sums = {}
    wanted: Sums = {}
    shares = from_every_rank(lambda: (written, _read_share(back, source, original)), doing=doing)
    for before, after in shares:
        wanted |= before
        found |= after
    _refuse(_unlike(wanted, found))
    equal = _equal_experts(wanted)[dist.get_rank() :: dist.get_world_size()]
    on_every_rank(
        lambda: _refuse([line for each in equal for line in _made_equal(each, original)]),
        doing=doing,
    )


@contextmanager
def told_of(folder: Path, target: Path) -> Iterator[None]:
    """Lets errors about a written folder speak of the name that it was to get."""
    try:
        yield
    except RunError as error:
        line = str(error).replace(f"{folder}/", "")
        raise RunError(f"{target} was not written right, and is removed: {line}") from None


def _refuse(lines: list[str]) -> None:
    if lines:
        raise RunError(listed(lines, most=4))


def _fingerprints(name: str, box: Box, values: Tensor) -> Sums:
    parts, first = (values.unbind(), box[0].start) if _is_stack(name) else ([values], 0)
    sums: Sums = {}
    for number, part in enumerate(parts, first):
        shape = tuple(part.shape)
        sums[name, number] = int(box_sum(part, Chunk(name, whole(shape), shape, part.dtype)))
    return sums


def _is_stack(name: str) -> bool:
    return ".experts." in name


def _check_files(folder: Path) -> None:
    """Raises RunError unless each tensor is in the one file that the index names, and sizes add
    up."""
    files = {path.name: opened(path) for path in sorted(folder.glob("*.safetensors"))}
    held = {(name, file) for file, tensors in files.items() for name in tensors}
    index = {"weight_map": {name: SINGLE for name, _ in held}}
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_bytes())
        stored = [each for tensors in files.values() for each in tensors.values()]
        size = sum(prod(each.get_shape()) * dtype_of(each).itemsize for each in stored)
        if (told := index["metadata"]["total_size"]) != size:
            raise RunError(f"{INDEX} says {told} bytes, but the tensors have {size}")
    named = set(index["weight_map"].items())
    lines = [f"{name} is in {file}, but {INDEX} does not say so" for name, file in held - named]
    lines += [f"{name} is not in {file}, as {INDEX} says" for name, file in named - held]
    _refuse(sorted(lines))


def _check_beside(folder: Path, original: Original, carried: Carried) -> None:
    """Raises RunError unless config.json is of this model, keeps all keys of the published one
    that do not follow from the model, and copied files are equal."""
    model, theirs = original.model, model_of(folder)
    lines = [f"{CONFIG} is of {theirs.family}"] if theirs.family != model.family else []
    lines += [f"{CONFIG}: {line}" for line in differences(model.config, theirs.config)]
    settings = {} if original.origin is None else read_settings(original.origin)
    settings = dict(settings if model.wrapper is not None else text_of(settings))
    written = read_settings(folder)
    after = flat_keys(written)
    own = model.settings().keys() | OUTDATED
    for key, value in flat_keys(settings).items():
        first, *inside = key.removeprefix("text_config.").split(".")
        if first in _ROPE_TABLES:
            may_differ = not ROPE.isdisjoint(inside) or not inside
        elif first in ENDS:
            may_differ = not carried.ends or value is None
        else:
            may_differ = first in own or (first == CODE and CODE not in written)
        if not may_differ and after.get(key) != value:
            lines.append(f"{CONFIG} has {key}={after.get(key)!r}, not {value!r} as published")
    for path in carried.files:
        if not (folder / path.name).is_file() or not cmp(path, folder / path.name, shallow=False):
            lines.append(f"{path.name} is not as in {path.parent}")
    _refuse(lines)


def _tied_twice(back: HFFolder, model: HFModel) -> list[str]:
    ways = [way for copy in model.first_of_group for way in model.keys.get(copy, ())]
    return [f"{way.name}, a tied weight, is there twice" for way in ways if way.name in back.shapes]


def _read_share(back: HFFolder, source: HFSource, original: Original) -> Sums:
    """Returns fingerprints of this rank's share of a written folder."""
    sums: Sums = {}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, box in list(_boxes(source, original))[rank::ranks]:
        dtype = original.types.get(name, torch.float32)
        for theirs in {piece.tensor for piece in source.found[name].pieces(box)}:
            if back.dtype(theirs) != dtype:
                raise RunError(f"{theirs} is {back.dtype(theirs)}, not {dtype}")
        values = torch.empty(sizes(box), dtype=dtype)
        source.copy(name, box, values)
        sums |= _fingerprints(name, box, values)
    rest = back.rest()
    for theirs, stored in list(original.rest.items())[rank::ranks]:
        if theirs not in rest or not torch.equal(rest[theirs][()], stored[()]):  # type: ignore[index]
            raise RunError(f"{theirs} is not as in {original.origin}")
    return sums


def _boxes(source: HFSource, original: Original) -> Iterator[tuple[str, Box]]:
    """Yields boxes that make up all of our tensors that a folder has, a tied weight's once."""
    for name, stored in source.found.items():
        if name not in original.model.first_of_group:
            shape = stored.shape
            boxes = cut(shape, _LARGEST_BOX) if _is_stack(name) else [whole(shape)]
            yield from ((name, box) for box in boxes)


def _unlike(wanted: Sums, found: Sums) -> list[str]:
    """Returns one line per tensor, or expert, that has not come back as it was."""
    experts = {(name, value): number for (name, number), value in wanted.items()}
    lines = []
    for name, number in sorted(wanted.keys() | found.keys()):
        value = found.get((name, number))
        if value == wanted.get((name, number)):
            continue
        what = f"{name}: expert {number}" if _is_stack(name) else name
        if value is None:
            lines.append(f"{what} is missing")
        elif (other := experts.get((name, value))) is not None:
            lines.append(f"{what} holds the weights of expert {other}")
        else:
            lines.append(f"{what} has other values than the checkpoint")
    return lines


def _equal_experts(sums: Sums) -> list[tuple[str, list[int]]]:
    """Returns the layers with experts that are equal in all of their tensors, and these."""
    experts: dict[tuple[str, int], list[int]] = defaultdict(list)
    for (name, number), value in sorted(sums.items()):
        if _is_stack(name):
            experts[name.rpartition(".")[0], number].append(value)
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for (layer, number), values in experts.items():
        groups[layer, tuple(values)].append(number)
    return [(layer, numbers) for (layer, _), numbers in groups.items() if len(numbers) > 1]


def _made_equal(group: tuple[str, list[int]], original: Original) -> list[str]:
    """Returns a line if experts that are equal in an export are not equal in what it is made of,
    where rounding has made them so."""
    layer, experts = group
    for name, shape in original.shapes.items():
        if name.rpartition(".")[0] != layer:
            continue
        first = original.read(name, (slice(experts[0], experts[0] + 1), *whole(shape[1:])))
        for box in cut(shape, _LARGEST_BOX):
            values = original.read(name, box)
            here = [each for each in experts if box[0].start <= each < box[0].stop]
            if not all(torch.equal(values[each - box[0].start], first[0]) for each in here):
                numbers = listed([str(each) for each in experts])
                return [
                    f"{layer}: experts {numbers} are equal in {original.types[name]}, but not in "
                    "the checkpoint: export float32"
                ]
    return []
