"""Writes the weights of a checkpoint as a Hugging Face folder.

All ranks agree on the files and on the rank that writes each of them, whole tensors at a time. The
folder gets its name when everything in it is on disk, has been read back and is right.
"""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titan_moe.checkpoint.digests import MANIFEST, damage, write_sums
from titan_moe.checkpoint.folder import new_folder
from titan_moe.checkpoint.hf.assets import HF, TYPE_KEYS, origin_of, write_assets
from titan_moe.checkpoint.hf.folder import (
    INDEX,
    REST,
    SINGLE,
    WIDER,
    HFFolder,
    Read,
    dtype_of,
    published_files,
    refuse_not_finite,
    save,
)
from titan_moe.checkpoint.hf.names import EXPERT_BIAS, TABLE, Shapes, write_as
from titan_moe.checkpoint.hf.peft import export_adapters
from titan_moe.checkpoint.hf.pieces import Stored, whole
from titan_moe.checkpoint.hf.read import Source, checkpoint_source, shown, speed_line
from titan_moe.checkpoint.hf.read_back import Original, boxes, compare
from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.config.errors import ConfigError
from titan_moe.distributed.agreement import on_every_rank, on_rank_zero
from titan_moe.distributed.boxes import inside
from titan_moe.models.decoder import stored_in
from titan_moe.models.hf import HFModel, read_settings, wrapper_of
from titan_moe.models.hf_settings import text_of
from titan_moe.runtime.errors import RunError, listed

logger = logging.getLogger(__name__)

LARGEST_FILE = 2 * 10**9
"""Bytes of a file, but of one with a single larger tensor: the memory that writing it takes."""
LARGEST_PUBLISHED = 10**10
"""Bytes of a file of the published folder that an export has too."""

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Targets = Mapping[str, list[Stored]]
"""The forms in which each of our tensors is written, by our name."""


class Written(NamedTuple):
    """A Hugging Face tensor of an export."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    ours: list[str]
    """Names of our tensors that it is made of."""
    rest: Any = None
    """A slice of safetensors that is written whole and unchanged, in place of ours."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


File = dict[str, Written]


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
    types = _written_types(targets, dtype)
    tensors = _tensors_of(targets, types, rest)
    split = on_every_rank(lambda: _split_files(tensors, origin), doing=doing)
    original = Original(model, types, read, origin, rest, texts.turn_ends.values())
    with new_folder(target, split.metadata["total_size"], doing=doing) as aside:

        def write_share() -> None:
            mine = list(split.filename_to_tensors)[dist.get_rank() :: dist.get_world_size()]
            for file in shown("export", mine, "file"):
                named = {name: tensors[name] for name in split.filename_to_tensors[file]}
                _write(aside / file, named, targets, original.read)

        def write_beside() -> bool:
            if [*split.filename_to_tensors] != [SINGLE]:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                (aside / INDEX).write_text(json.dumps(index, sort_keys=True))
            tokenizer = job.get("model", {}).get("tokenizer_path")
            return write_assets(model, origin, folders, texts, dtype, aside, tokenizer)

        on_every_rank(write_share, doing=doing)
        verify(doing=doing)
        keeps_ends = on_rank_zero(write_beside, doing=doing)
        compare(aside, original, keeps_ends=keeps_ends, doing=doing)
        write_sums(aside, doing=doing)
    return split.metadata["total_size"]


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


def _write(path: Path, file: File, targets: Targets, read: Read) -> None:
    """Writes one file. A stack of experts is read some experts at a time."""
    tensors = {
        theirs: torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.rest is None
        else tensor.rest[()]
        for theirs, tensor in file.items()
    }
    for name in dict.fromkeys(chain.from_iterable(tensor.ours for tensor in file.values())):
        ways = targets[name]
        for box in boxes(name, ways[0].shape):
            pieces = [piece for way in ways for piece in way.pieces(box) if piece.tensor in file]
            values = read(name, box) if pieces else torch.empty(0)
            for piece in pieces:
                ours = values[inside(piece.ours, box)]
                ours = ours.transpose(-1, -2) if piece.transposed else ours
                place = tensors[piece.tensor][piece.theirs]
                place.copy_(ours.reshape(place.shape))
    for theirs, tensor in file.items():
        if tensor.rest is None:
            refuse_not_finite(tensors[theirs], theirs, WIDER)
    save(tensors, path, {})


def published_type(origin: Path | None) -> torch.dtype:
    """The type that the config.json of published weights names; bfloat16 if it names none that is
    written here."""
    settings = {} if origin is None else read_settings(origin)
    named = [table.get(key) for table in (settings, text_of(settings)) for key in TYPE_KEYS]
    return next((_TYPES[name] for name in named if name in _TYPES), torch.bfloat16)


def _written_types(targets: Targets, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type that each of our tensors is written in: `dtype`, but at least float32 where
    published code keeps that: routing biases, decay rates, and the weights of routers that have a
    routing bias."""
    types = {}
    for name in targets:
        layer, is_router, _ = name.partition(".router.gate.weight")
        chosen = {layer + EXPERT_BIAS, layer + TABLE} & targets.keys()
        types[name] = stored_in(name, dtype)
        if is_router and chosen:
            types[name] = torch.promote_types(dtype, torch.float32)
        if name.endswith(EXPERT_BIAS):
            types[name] = torch.float32
    return types


def _tensors_of(
    targets: Targets, types: Mapping[str, torch.dtype], rest: Mapping[str, Any]
) -> File:
    """Returns all tensors of an export by name.

    Args:
        rest: further tensors, as `HFFolder.rest` returns them.
    """
    tensors: File = {}
    for name, ways in targets.items():
        for theirs, shape in (item for way in ways for item in way.tensors().items()):
            tensors.setdefault(theirs, Written(shape, types[name], [])).ours.append(name)
    for name, stored in rest.items():
        tensors[name] = Written(tuple(stored.get_shape()), dtype_of(stored), [], stored)
    return tensors


def _split_files(tensors: File, origin: Path | None) -> Any:
    """Returns the names of tensors by file: as the published folder has them, if its index names
    the same tensors and no file is larger than LARGEST_PUBLISHED; else files of at most
    LARGEST_FILE bytes. A file of one larger tensor holds it alone."""
    # It takes a while.
    from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory

    files: dict[str, list[str]] = {}
    index = {} if origin is None else published_files(origin)
    for name in tensors:
        files.setdefault(index.get(name, ""), []).append(name)
    sizes = {file: sum(tensors[name].nbytes for name in names) for file, names in files.items()}
    if index.keys() == tensors.keys() and max(sizes.values()) <= LARGEST_PUBLISHED:
        return StateDictSplit({"total_size": sum(sizes.values())}, files, dict(index))
    return split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=LARGEST_FILE,
    )


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
