"""Sources of exports: the model of a checkpoint, or of a Hugging Face folder."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.checkpoint.checksums import box_sum, gather_sums
from titan_moe.checkpoint.digests import check_sums
from titan_moe.checkpoint.hf.assets import asset_folders
from titan_moe.checkpoint.hf.folder import HFFolder, Read
from titan_moe.checkpoint.hf.names import Shapes
from titan_moe.checkpoint.hf.read import HFSource, model_of_manifest, shapes_of_manifest
from titan_moe.checkpoint.manifest import Manifest, compare_checksums
from titan_moe.checkpoint.tensors import MODEL, Chunk, StoredTensors
from titan_moe.distributed.boxes import Box
from titan_moe.models.hf import HFModel, model_of
from titan_moe.models.hf_settings import TextFormat
from titan_moe.runtime.errors import RunError


class Source(NamedTuple):
    """A model, and its tensors by our names."""

    model: HFModel
    shapes: Shapes
    """Shapes of all whole tensors; the same on every rank."""
    read: Read
    """Returns a box of a tensor, on the CPU."""
    folders: Sequence[Path] = ()
    """Folders that may hold config.json and the tokenizer's files, the likeliest first."""
    job: Mapping[str, Any] = MappingProxyType({})
    """The configuration of the run that made it, if one did."""
    verify: Callable[..., None] = lambda doing: None
    """Raises RunError if what has been read cannot be trusted; collective."""
    texts: TextFormat = TextFormat()


def checkpoint_source(path: Path, manifest: Manifest) -> Source:
    """The model of a checkpoint, or its adapters. Raises RunError if the model is not known."""
    stored = StoredTensors(path)
    sums: dict[tuple[str, str], int] = {}

    def read(name: str, box: Box) -> Tensor:
        spec = manifest.tensors[MODEL + name]
        chunk = Chunk(MODEL + name, box, spec.shape, getattr(torch, spec.dtype))
        values = stored.read(chunk)
        # A tensor that is written twice, as a copy too, is read twice: it counts once.
        sums[chunk.name, str(box)] = int(box_sum(values, chunk))
        return values

    def verify(*, doing: str) -> None:
        if damaged := compare_checksums(manifest, gather_sums(sums, doing=doing)):
            raise RunError(
                f"checkpoint {path} is damaged: wrong checksum of {', '.join(damaged[:4])}"
            )

    model, shapes = model_of_manifest(manifest, path), shapes_of_manifest(manifest)
    folders = asset_folders(path, manifest.job)
    return Source(model, shapes, read, folders, manifest.job, verify, manifest.texts)


def folder_source(path: Path) -> Source:
    """The model of a Hugging Face folder. Raises RunError or ConfigError."""
    model = model_of(path)
    source = HFSource(HFFolder(path), model)
    shapes = {name: place.shape for name, place in source.found.items()}
    return Source(model, shapes, source.read, [path], verify=partial(check_sums, path))
