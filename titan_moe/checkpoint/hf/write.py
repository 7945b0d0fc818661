"""Writes the weights of a checkpoint as a Hugging Face folder.

All ranks agree on the files and on the rank that writes each of them, whole tensors at a time. The
folder gets its name when everything in it is on disk, has been read back and is right.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_moe.checkpoint.digests import MANIFEST, damage, write_sums
from titan_moe.checkpoint.folder import new_folder
from titan_moe.checkpoint.hf.assets import HF, Carried, origin_of, write_assets
from titan_moe.checkpoint.hf.folder import (
    INDEX,
    REST,
    SINGLE,
    WIDER,
    HFFolder,
    Read,
    refuse_not_finite,
    save,
)
from titan_moe.checkpoint.hf.names import EXPERT_BIAS, Shapes, write_as
from titan_moe.checkpoint.hf.peft import export_adapters
from titan_moe.checkpoint.hf.pieces import Piece, Stored, whole
from titan_moe.checkpoint.hf.read import progress_bar, speed_line
from titan_moe.checkpoint.hf.read_back import LARGEST_BOX, Original, compare, is_stack
from titan_moe.checkpoint.hf.shards import (
    File,
    published_type,
    split_files,
    tensors_of,
    written_types,
)
from titan_moe.checkpoint.hf.source import Source, checkpoint_source
from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.config.errors import ConfigError
from titan_moe.distributed.agreement import on_every_rank, on_rank_zero
from titan_moe.distributed.boxes import Box, inside, sizes
from titan_moe.models.hf import HFModel, read_settings, wrapper_of
from titan_moe.runtime.errors import RunError, listed

logger = logging.getLogger(__name__)


def export_checkpoint(checkpoint: Path, target: Path, dtype: torch.dtype | None) -> str:
    """Write a checkpoint's model as a Hugging Face folder, or its adapters as a PEFT folder;
    returns a line that says how fast. Collective.

    Raises ConfigError or RunError in one line each; nothing is left then.
    """
    started = time.perf_counter()
    doing = f"cannot export {checkpoint}"
    manifest = on_every_rank(lambda: read_manifest(checkpoint), doing=doing)
    source = on_every_rank(lambda: checkpoint_source(checkpoint, manifest), doing=doing)
    if manifest.base:
        num_bytes = export_adapters(source, target, dtype)
        return speed_line(f"exported {target}", num_bytes, started)
    num_bytes = export(source, target, dtype)
    return speed_line(f"exported and read back {target}", num_bytes, started)


def export(source: Source, target: Path, dtype: torch.dtype | None) -> int:
    """Write a Hugging Face folder; returns its tensors' bytes. Collective.

    Args:
        dtype: of the floating-point tensors, but for those that published code keeps in float32;
            None: as the config.json of the published weights says, or bfloat16.

    Raises RunError when the target exists, when a tensor has no place in that form, when it cannot
    be written, or what was written is not what was read: nothing is left then.
    """
    doing = f"cannot export to {target}"
    model, shapes, read, folders, job, verify, texts = source
    on_every_rank(model.settings, doing=doing)
    origin = on_every_rank(lambda: origin_of(model, folders), doing=doing)
    on_rank_zero(lambda: _check_rest(origin), doing=doing)
    around = on_every_rank(lambda: _around(origin), doing=doing)
    if around is not None:
        model = replace(model, wrapper=wrapper_of(around.settings))
    stored = {} if around is None else around.text_shapes()
    rest = {} if around is None else around.rest()
    if rest and dist.get_rank() == 0:
        logger.info("%d tensors of %s that do not train come along", len(rest), origin)
    targets = write_as(model, shapes, stored)
    on_every_rank(lambda: _refuse_lost_bias(model, shapes, targets, read), doing=doing)
    dtype = dtype or on_every_rank(lambda: published_type(origin), doing=doing)
    types = written_types(targets, dtype)
    tensors = tensors_of(targets, types, rest)
    split = on_every_rank(lambda: split_files(tensors, origin), doing=doing)
    original = Original(model, types, read, origin, rest)
    with new_folder(target, split.metadata["total_size"], doing=doing) as aside:

        def write_beside() -> Carried:
            if [*split.filename_to_tensors] != [SINGLE]:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                (aside / INDEX).write_text(json.dumps(index, sort_keys=True))
            tokenizer = job.get("model", {}).get("tokenizer_path")
            return write_assets(model, origin, folders, texts, dtype, aside, tokenizer)

        on_every_rank(lambda: _write_share(aside, split, tensors, original.read), doing=doing)
        verify(doing=doing)
        carried = on_rank_zero(write_beside, doing=doing)
        compare(aside, original, carried, doing=doing)
        write_sums(aside, doing=doing)
    return split.metadata["total_size"]


def _write_share(aside: Path, split: Any, tensors: File, read: Read) -> None:
    """Writes this rank's share of the files."""
    files = list(split.filename_to_tensors.items())[dist.get_rank() :: dist.get_world_size()]
    with progress_bar("export", len(files), "file") as bar:
        for file, names in files:
            _write(aside / file, {name: tensors[name] for name in names}, read)
            bar.update()


def _check_rest(origin: Path | None) -> None:
    """Raises RunError if the rest that an import has kept is not as it was written."""
    if origin is None:
        return
    checkpoint = origin.parent
    if not (origin / REST).is_file() or not (checkpoint / MANIFEST).exists():
        return
    digests = read_manifest(checkpoint).files
    if lines := damage(checkpoint, digests, MANIFEST, [f"{HF}/{REST}"]):
        raise RunError(f"checkpoint {checkpoint} is damaged: {lines[0]}")


def _around(origin: Path | None) -> HFFolder | None:
    """The folder that a text model came out of, if that has the tensors around it."""
    if origin is None or wrapper_of(read_settings(origin)) is None:
        return None
    try:
        folder = HFFolder(origin)
    except (RunError, ConfigError) as error:
        logger.warning("the text model is exported alone: %s", error)
        return None
    return folder if folder.rest() else None


def _write(path: Path, file: File, read: Read) -> None:
    tensors = {
        theirs: torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.rest is None
        else tensor.rest[()]
        for theirs, tensor in file.items()
    }
    parts: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
    for theirs, tensor in file.items():
        for name, piece in tensor.pieces:
            parts[name].append((theirs, piece))
    for name, pieces in parts.items():
        for box, inner in _boxes(name, pieces):
            values = read(name, box)
            for theirs, piece in inner:
                ours = values[inside(piece.ours, box)]
                ours = ours.transpose(-1, -2) if piece.transposed else ours
                place = tensors[theirs][piece.theirs]
                place.copy_(ours.reshape(place.shape))
    for theirs, tensor in file.items():
        if tensor.rest is None:
            refuse_not_finite(tensors[theirs], theirs, WIDER)
    save(tensors, path, {})


def _boxes(
    name: str, pieces: list[tuple[str, Piece]]
) -> Iterator[tuple[Box, list[tuple[str, Piece]]]]:
    """Yields the boxes of our tensor that a file's pieces are read in, with the pieces of each: all
    of it, or of a stack some experts at a time, as many as LARGEST_BOX elements hold."""
    step = max(1, LARGEST_BOX // prod(sizes(pieces[0][1].ours)[1:])) if is_stack(name) else None
    ordered = sorted(pieces, key=lambda part: part[1].ours[0].start)
    for _, group in groupby(ordered, lambda part: step and part[1].ours[0].start // step):
        inner = list(group)
        first, *others = inner[0][1].ours
        stop = max(piece.ours[0].stop for _, piece in inner)
        yield (slice(first.start, stop), *others), inner


def _refuse_lost_bias(
    model: HFModel, shapes: Shapes, targets: Mapping[str, list[Stored]], read: Read
) -> None:
    """Raises RunError for a bias of the routing that is not zero, among tensors without a place."""
    biases = [name for name in shapes if name.endswith(EXPERT_BIAS) and name not in targets]
    if lost := [name for name in biases if read(name, whole(shapes[name])).count_nonzero()]:
        raise RunError(
            f"{listed(lost)}: a routing bias that is not zero has no place in the Hugging Face "
            f"form of {model.family} with {model.config.moe and model.config.moe.score} scores"
        )
