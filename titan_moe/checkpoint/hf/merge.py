"""Adds adapters to the weights that they were trained beside, and writes the sums as a Hugging Face
folder."""

import time
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from titan_moe.checkpoint.checksums import box_sum, gather_sums, joint_digest
from titan_moe.checkpoint.hf.assets import origin_of
from titan_moe.checkpoint.hf.folder import is_hf_folder
from titan_moe.checkpoint.hf.peft import base_of
from titan_moe.checkpoint.hf.pieces import cut, whole
from titan_moe.checkpoint.hf.read import (
    LARGEST_CHUNK,
    Source,
    checkpoint_source,
    folder_source,
    speed_line,
)
from titan_moe.checkpoint.hf.write import export, published_type
from titan_moe.checkpoint.manifest import Manifest, read_manifest, refuse_adapters
from titan_moe.checkpoint.tensors import MODEL, Chunk
from titan_moe.config.job_config import Lora, Training
from titan_moe.distributed.agreement import on_every_rank
from titan_moe.distributed.boxes import Box, sizes
from titan_moe.models.decoder import stored_in
from titan_moe.models.hf import differences
from titan_moe.models.lora import empty_model, pairs_of
from titan_moe.runtime.errors import RunError


class _Merged:
    """A base with the products of adapters added, in the type of an export, and checksums of the
    base as the adapters' run had it, in the type of products."""

    def __init__(self, base: Source, adapters: Source, dtype: torch.dtype) -> None:
        self._base, self._adapters, self._dtype = base, adapters, dtype
        self._pairs, self._scale = pairs_of(adapters.shapes), Lora(**adapters.job["lora"]).scale
        training = Training(**adapters.job["training"])
        is_float64 = training.dtype == "float64"
        products = getattr(torch, "float64" if is_float64 else training.mixed_precision_param)
        own = empty_model(adapters.model.config).named_parameters()
        self._types = {name: stored_in(name, products) for name, _ in own}
        self._sums: dict[tuple[str, str], int] = {}
        self._pair = lru_cache(maxsize=1)(self._read_pair)  # Boxes of a tensor come in a row.

    def read(self, name: str, box: Box) -> Tensor:
        """Returns a box of a tensor: of an adapted one in the type of the export, else in that of
        the base."""
        if name not in self._pairs:
            return self._read_base(name, box)
        a, b = self._pair(name)
        sums = torch.empty(sizes(box), dtype=self._dtype)
        for part in cut(sums.shape, LARGEST_CHUNK):
            first = box[0].start  # Only rows are cut.
            place = slice(first + part[0].start, first + part[0].stop), *box[1:]
            all_ranks = *place[:-2], slice(None), place[-1]
            product = b[place[:-1]] @ a[all_ranks]
            sums[part] = self._read_base(name, place).double() + self._scale * product
        return sums

    def _read_pair(self, name: str) -> list[Tensor]:
        shapes = self._adapters.shapes
        return [self._adapters.read(x, whole(shapes[x])).double() for x in self._pairs[name]]

    def _read_base(self, name: str, box: Box) -> Tensor:
        values = self._base.read(name, box)
        if name in self._types:  # Others than the run's own have no checksum.
            chunk = Chunk(MODEL + name, box, self._base.shapes[name], self._types[name])
            self._sums[chunk.name, str(box)] = int(box_sum(values.to(chunk.dtype), chunk))
        return values

    def base_digest(self, *, doing: str) -> str:
        """Returns the digest of what all ranks have read of the base; collective."""
        totals = gather_sums(self._sums, doing=doing)
        for copy, first in self._adapters.model.first_of_group.items():
            totals[MODEL + copy] = totals[MODEL + first]
        return joint_digest(totals)


def merge(
    checkpoint: Path, target: Path, dtype: torch.dtype | None, base: Path | None = None
) -> str:
    """Write the model of a checkpoint of adapters as a Hugging Face folder: W + scale B A, added in
    float64 and rounded once. Returns a line that says how fast. Collective.

    Args:
        dtype: as `export` takes it.
        base: a Hugging Face folder or a checkpoint; None: what the adapters' run began with.

    Raises RunError in one line; nothing is left then.
    """
    started, doing = time.perf_counter(), f"cannot merge {checkpoint}"
    manifest = on_every_rank(lambda: read_manifest(checkpoint), doing=doing)
    source = on_every_rank(lambda: _sum(checkpoint, manifest, base, dtype), doing=doing)
    return speed_line(f"merged {target}", export(source, target, dtype), started)


def _sum(
    checkpoint: Path, manifest: Manifest, named: Path | None, dtype: torch.dtype | None
) -> Source:
    """The model of the sums. Raises RunError when the base is not of the adapters' model."""
    if not manifest.base:
        raise RunError(f"{checkpoint} holds no adapters: titan-moe hf export writes its model")
    name = named or base_of(manifest.job)
    if name is None:
        raise RunError(f"{checkpoint} does not name the weights that it began with: give --base")
    path, adapters = Path(name), checkpoint_source(checkpoint, manifest)
    if is_hf_folder(path):
        base = folder_source(path)
    else:
        of_base = read_manifest(path)
        refuse_adapters(of_base, path)
        base = checkpoint_source(path, of_base)
    ours, theirs = adapters.model, base.model
    lines = differences(ours.config, theirs.config)
    if ours.family != theirs.family:
        lines = [f"a {theirs.family} model, not {ours.family}"]
    if lines:
        raise RunError(f"{path} is not the base of {checkpoint}: {', '.join(lines)}")
    if lost := sorted(pairs_of(adapters.shapes).keys() - base.shapes.keys()):
        raise RunError(f"{path} has no {', '.join(lost[:4])}, which {checkpoint} has adapters of")
    folders = [*base.folders, *adapters.folders]
    merged = _Merged(base, adapters, dtype or published_type(origin_of(theirs, folders)))

    def verify(*, doing: str) -> None:
        adapters.verify(doing=doing)
        base.verify(doing=doing)
        if merged.base_digest(doing=doing) != manifest.base:
            raise RunError(f"{checkpoint} has adapters of other weights: name theirs with --base")

    return Source(theirs, base.shapes, merged.read, folders, manifest.job, verify, manifest.texts)
