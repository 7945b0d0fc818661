"""Writing a Hugging Face folder: every rank writes its own boxes into their places.

All ranks compute the same headers and offsets; rank 0 makes the files, whose data each then writes
with no exchange of tensors. The folder gets its name when everything in it is on disk.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.folder import new_folder, write_json
from titan_moe.checkpoint.hf.folder import INDEX, SINGLE
from titan_moe.checkpoint.hf.names import EXPERT_BIAS, Shapes, has_place, listed, write_as
from titan_moe.checkpoint.hf.pieces import Box, Piece, Stored, cut, lengths, relative, runs
from titan_moe.checkpoint.hf.pieces import key as key_of
from titan_moe.checkpoint.hf.safetensors_file import as_bytes, make_header, write_all
from titan_moe.checkpoint.hf.sources import LARGEST, Source, one_ahead, progress_bar
from titan_moe.distributed.agreement import on_every_rank, on_rank_zero
from titan_moe.models.hf import HFModel
from titan_moe.runtime.errors import RunError

LARGEST_FILE = 5 * 10**9


class Place(NamedTuple):
    """Where a tensor of theirs is in the files."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class Layout(NamedTuple):
    """The files of a folder."""

    headers: dict[str, bytes]
    sizes: dict[str, int]
    places: dict[str, Place]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(prod(p.shape) * p.dtype.itemsize for p in self.places.values())


def export(
    model: HFModel,
    shapes: Shapes,
    source: Source,
    target: Path,
    *,
    dtype: torch.dtype,
    write_assets: Callable[[Path], None],
    largest_file: int = LARGEST_FILE,
) -> int:
    """Write a Hugging Face folder; returns its tensors' bytes. Collective.

    Args:
        shapes: of all our tensors, whole; the same on every rank.
        source: gives each of its boxes in one piece.
        dtype: of the floating-point tensors; the routing's bias stays float32.
        write_assets: adds config.json and the like to the folder; called on rank 0.

    Raises RunError when the target exists, when a tensor has no place in that form, when a tensor
    is not held whole by the ranks together, or when it cannot be written: nothing is left then.
    """
    doing = f"cannot export to {target}"
    on_every_rank(model.settings, doing=doing)
    targets = write_as(model, shapes)
    on_every_rank(lambda: _refuse_lost_bias(model, source), doing=doing)
    layout = plan_files(targets, dtype, largest_file)
    with new_folder(target, sum(layout.sizes.values()), doing=doing) as aside:
        on_rank_zero(lambda: _make_files(aside, layout), doing=doing)
        mine = _own_boxes(source.boxes(), targets)
        with progress_bar("export", _bytes_of(mine, targets, layout)) as bar:
            on_every_rank(
                lambda: _write(mine, targets, layout, source, aside, bar.update), doing=doing
            )
        _check_complete(mine, targets, shapes)
        source.verify()
        on_rank_zero(lambda: write_assets(aside), doing=doing)
    return layout.num_bytes


def plan_files(
    targets: Mapping[str, list[Stored]], dtype: torch.dtype, largest_file: int
) -> Layout:
    """Files of at most `largest_file` bytes (one larger tensor has a file of its own)."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, ways in targets.items():
        of_type = torch.float32 if name.endswith(EXPERT_BIAS) else dtype
        for way in ways:
            tensors |= {theirs: (of_type, shape) for theirs, shape in way.tensors().items()}
    files: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    filled = 0
    for theirs, (of_type, shape) in tensors.items():
        size = prod(shape) * of_type.itemsize
        if files[-1] and filled + size > largest_file:
            files.append({})
            filled = 0
        files[-1][theirs] = (of_type, shape)
        filled += size
    layout = Layout({}, {}, {})
    for number, held in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        layout.headers[file], places, layout.sizes[file] = make_header(held)
        for theirs, (of_type, shape) in held.items():
            layout.places[theirs] = Place(file, of_type, shape, places[theirs])
    return layout


def _refuse_lost_bias(model: HFModel, source: Source) -> None:
    """A bias of the routing that is not zero and has no place would be lost silently."""
    lost = [
        name
        for name, boxes in source.boxes().items()
        if name.endswith(EXPERT_BIAS)
        and not has_place(model, name)
        and any(bool(_values(source, name, box).count_nonzero()) for box in boxes)
    ]
    if lost:
        raise RunError(
            f"{listed(lost)}: a routing bias that is not zero has no place in the Hugging Face "
            f"form of {model.family} with {model.config.moe and model.config.moe.score} scores"
        )


def _make_files(folder: Path, layout: Layout) -> None:
    """The files in full length, without their data; and their index."""
    for file, header in layout.headers.items():
        with (folder / file).open("wb") as opened:
            opened.write(header)
            opened.truncate(layout.sizes[file])
    if len(layout.headers) > 1:
        index: dict[str, Any] = {
            "metadata": {"total_size": layout.num_bytes},
            "weight_map": {name: place.file for name, place in sorted(layout.places.items())},
        }
        write_json(folder / INDEX, index)


def _own_boxes(
    held: Mapping[str, list[Box]], targets: Mapping[str, list[Stored]]
) -> dict[str, list[Box]]:
    """The boxes that this rank is the first to hold; collective."""
    mine = {name: [key_of(box) for box in boxes] for name, boxes in held.items() if name in targets}
    everyone: list[dict[str, list[tuple]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    before = {
        (name, key)
        for others in everyone[: dist.get_rank()]
        for name, keys in others.items()
        for key in keys
    }
    return {
        name: [
            box for box in held[name] if (name, key_of(box)) not in before and 0 not in lengths(box)
        ]
        for name in mine
    }


def _bytes_of(
    mine: Mapping[str, list[Box]], targets: Mapping[str, list[Stored]], layout: Layout
) -> int:
    total = 0
    for name, boxes in mine.items():
        for way in targets[name]:
            itemsize = layout.places[next(iter(way.tensors()))].dtype.itemsize
            total += itemsize * sum(prod(lengths(box)) for box in boxes)
    return total


def _check_complete(
    mine: Mapping[str, list[Box]], targets: Mapping[str, list[Stored]], shapes: Shapes
) -> None:
    """Boxes of different ranks do not overlap: their elements add up or something is missing."""
    counts = {name: sum(prod(lengths(box)) for box in boxes) for name, boxes in mine.items()}
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, counts)
    short = [
        name
        for name in targets
        if sum(counts.get(name, 0) for counts in everyone) != prod(shapes[name])
    ]
    if short:
        raise RunError(f"no rank holds all of {listed(short)}: nothing is exported")


def _write(
    mine: Mapping[str, list[Box]],
    targets: Mapping[str, list[Stored]],
    layout: Layout,
    source: Source,
    folder: Path,
    advance: Callable[[int], object],
) -> None:
    with ExitStack() as stack:
        descriptors: dict[str, int] = {}

        def put(theirs: str, box: Box, values: Tensor) -> None:
            place = layout.places[theirs]
            if place.file not in descriptors:
                descriptors[place.file] = os.open(folder / place.file, os.O_WRONLY)
                stack.callback(os.close, descriptors[place.file])
            finite = place.dtype != torch.float16 or bool(values.isfinite().all())
            values = values.to(place.dtype).cpu().contiguous()
            if finite and place.dtype == torch.float16 and not values.isfinite().all():
                raise RunError(f"{theirs} has values that float16 cannot hold: export bfloat16")
            data, item = as_bytes(values), place.dtype.itemsize
            for run in runs(place.shape, box):
                part = data[run.box_offset * item : (run.box_offset + run.length) * item]
                write_all(descriptors[place.file], part, place.start + run.offset * item)
            advance(len(data))

        def read(one: Group) -> tuple[Group, dict[str, Tensor]]:
            return one, {name: _values(source, name, one.box) for name in dict(one.ways)}

        for (ways, box), values in one_ahead(read, _together(mine, targets)):
            for part in cut(box, LARGEST):
                own = relative(part, box)
                boxes = [
                    (piece, values[name][own][relative(piece.ours, part)])
                    for name, way in ways
                    for piece in way.pieces(part)
                ]
                for theirs, at, merged in _merged(boxes):
                    put(theirs, at, merged)
        for descriptor in descriptors.values():
            os.fsync(descriptor)


def _values(source: Source, name: str, box: Box) -> Tensor:
    ((_, values),) = source.read(name, box)
    return values


class Group(NamedTuple):
    """One box of one or two tensors, and what they are written as."""

    ways: list[tuple[str, Stored]]
    box: Box


def _together(
    mine: Mapping[str, list[Box]], targets: Mapping[str, list[Stored]]
) -> Iterable[Group]:
    """Boxes to write, those that take turns in one tensor of theirs together: written alone, each
    element would be a run of its own. What is read once is written with all its copies."""
    groups: dict[tuple, list[tuple[str, Stored]]] = defaultdict(list)
    boxes: dict[tuple, Box] = {}
    for name, own in mine.items():
        for box in own:
            first = targets[name][0].way
            turns = first.part in ("even", "odd")
            key = (first.name if turns else name, key_of(box))
            groups[key] += [(name, way) for way in targets[name]]
            boxes[key] = box
    for key, ways in groups.items():
        yield Group(ways, boxes[key])


def _merged(pieces: list[tuple[Piece, Tensor]]) -> Iterable[tuple[str, Box, Tensor]]:
    """Boxes of theirs and their values; even and odd rows that lie in one box become it."""
    waiting: dict[tuple, tuple[Piece, Tensor]] = {}
    for piece, values in pieces:
        sizes = lengths(piece.theirs)
        if piece.transposed:
            values = values.transpose(-1, -2)
        values = values.reshape(sizes)
        if all((part.step or 1) == 1 for part in piece.theirs):
            yield piece.tensor, piece.theirs, values
            continue
        around = tuple(
            slice(part.start - part.start % (part.step or 1), part.stop) for part in piece.theirs
        )
        key = (piece.tensor, key_of(around))
        if key not in waiting:
            waiting[key] = piece, values
            continue
        other, other_values = waiting.pop(key)
        both = values.new_empty(lengths(around))
        both[_within(piece.theirs, around)] = values
        both[_within(other.theirs, around)] = other_values
        yield piece.tensor, around, both
    for piece, values in waiting.values():
        yield piece.tensor, piece.theirs, values


def _within(box: Box, around: Box) -> Box:
    return tuple(
        slice(part.start - first.start, part.stop - first.start, part.step)
        for part, first in zip(box, around, strict=True)
    )
