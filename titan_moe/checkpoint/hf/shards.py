"""Plans an export: its tensors with their types, and the files that they are in."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titan_moe.checkpoint.hf.assets import TYPE_KEYS
from titan_moe.checkpoint.hf.folder import dtype_of, published_files
from titan_moe.checkpoint.hf.names import EXPERT_BIAS
from titan_moe.checkpoint.hf.pieces import Piece, Stored, whole
from titan_moe.models.decoder import is_wide
from titan_moe.models.hf import read_settings
from titan_moe.models.hf_settings import text_of

LARGEST_FILE = 2 * 10**9
"""Bytes of a file, but of one with a single larger tensor: the memory that writing it takes."""
LARGEST_PUBLISHED = 10**10
"""Bytes of a file of the published folder that an export has too."""

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Targets = Mapping[str, list[Stored]]
"""The forms in which each of our tensors is written, by our name."""


class Written(NamedTuple):
    """A Hugging Face tensor, and the boxes of our tensors that it is made of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[str, Piece]]
    rest: Any = None
    """A slice of safetensors that is written whole and unchanged, in place of pieces."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


File = dict[str, Written]


def published_type(origin: Path | None) -> torch.dtype:
    """The type that the config.json of published weights names; bfloat16 if it names none that is
    written here."""
    settings = {} if origin is None else read_settings(origin)
    named = [table.get(key) for table in (settings, text_of(settings)) for key in TYPE_KEYS]
    return next((_TYPES[name] for name in named if name in _TYPES), torch.bfloat16)


def written_types(targets: Targets, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type that each of our tensors is written in: `dtype`, but at least float32 where
    published code keeps that: routing biases, decay rates, and the weights of routers that have a
    routing bias."""
    types = {}
    for name in targets:
        layer, is_router, _ = name.partition(".router.gate.weight")
        wide = is_wide(name) or (bool(is_router) and layer + EXPERT_BIAS in targets)
        types[name] = torch.promote_types(dtype, torch.float32) if wide else dtype
        if name.endswith(EXPERT_BIAS):
            types[name] = torch.float32
    return types


def tensors_of(targets: Targets, types: Mapping[str, torch.dtype], rest: Mapping[str, Any]) -> File:
    """Returns all tensors of an export by name.

    Args:
        rest: further tensors, as `HFFolder.rest` returns them.
    """
    tensors: File = {}
    for name, ways in targets.items():
        for way in ways:
            for theirs, shape in way.tensors().items():
                tensors.setdefault(theirs, Written(shape, types[name], []))
            for piece in way.pieces(whole(way.shape)):
                tensors[piece.tensor].pieces.append((name, piece))
    for name, stored in rest.items():
        shape = tuple(stored.get_shape())
        tensors[name] = Written(shape, dtype_of(stored), [], stored)
    return tensors


def split_files(tensors: File, origin: Path | None) -> Any:
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
