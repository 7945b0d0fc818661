"""Adds adapters to the weights that they were trained beside, and writes the sums as a Hugging Face
folder."""

import time
from pathlib import Path

import torch
from torch import Tensor

from titan_moe.checkpoint.checksums import box_sum, gather_sums, joint_digest
from titan_moe.checkpoint.hf.assets import asset_folders, origin_of
from titan_moe.checkpoint.hf.folder import is_hf_folder
from titan_moe.checkpoint.hf.names import empty_model
from titan_moe.checkpoint.hf.peft import base_of
from titan_moe.checkpoint.hf.pieces import cut, whole
from titan_moe.checkpoint.hf.read import (
    LARGEST_CHUNK,
    model_of_manifest,
    shapes_of_manifest,
    speed_line,
)
from titan_moe.checkpoint.hf.shards import published_type
from titan_moe.checkpoint.hf.source import Source, checkpoint_source, folder_source
from titan_moe.checkpoint.hf.write import EndsOf, export, no_ends, tokenizer_arguments
from titan_moe.checkpoint.manifest import Manifest, read_manifest, refuse_adapters
from titan_moe.checkpoint.tensors import MODEL, Chunk
from titan_moe.config.job_config import Lora, Training
from titan_moe.distributed.agreement import on_every_rank
from titan_moe.distributed.boxes import Box, sizes
from titan_moe.models.decoder import stored_in
from titan_moe.models.hf import HFModel, differences
from titan_moe.models.lora import pairs_of
from titan_moe.runtime.errors import RunError


class _BaseWeights:
    """A base, and checksums of it as the adapters' run had it, in the type of products."""

    def __init__(self, base: Source, manifest: Manifest, model: HFModel) -> None:
        self._base = base
        training = Training(**manifest.job.get("training", {}))
        is_float64 = training.dtype == "float64"
        self._dtype = (
            torch.float64 if is_float64 else getattr(torch, training.mixed_precision_param)
        )
        named = empty_model(model.config).named_parameters()
        self._shapes = {name: tuple(parameter.shape) for name, parameter in named}
        self._copies = model.first_of_group
        self._sums: dict[tuple[str, str], int] = {}

    def read(self, name: str, box: Box) -> Tensor:
        """Returns a box of a tensor; others than the run's own have no checksum."""
        values = self._base.read(name, box)
        if name in self._shapes:
            chunk = Chunk(MODEL + name, box, self._shapes[name], stored_in(name, self._dtype))
            self._sums[chunk.name, str(box)] = int(box_sum(values.to(chunk.dtype), chunk))
        return values

    def digest(self, *, doing: str) -> str:
        """Returns the digest of what all ranks have read; collective."""
        totals = gather_sums(self._sums, doing=doing)
        copies = {MODEL + copy: totals[MODEL + first] for copy, first in self._copies.items()}
        return joint_digest(totals | copies)


class _Merged:
    """A base with the products of adapters added, in the type of an export."""

    def __init__(
        self, base: Source, checkpoint: Path, manifest: Manifest, dtype: torch.dtype
    ) -> None:
        self._base, self._checkpoint, self._manifest = base, checkpoint, manifest
        self._adapters, self._dtype = checkpoint_source(checkpoint, manifest), dtype
        self._pairs = pairs_of(self._adapters.shapes)
        self._scale = Lora(**manifest.job["lora"]).scale
        self._weights = _BaseWeights(base, manifest, self._adapters.model)

    def read(self, name: str, box: Box) -> Tensor:
        """Returns a box of a tensor: of an adapted one in the type of the export, else in that of
        the base."""
        if name not in self._pairs:
            return self._weights.read(name, box)
        a, b = (
            self._adapters.read(each, whole(self._adapters.shapes[each])).double()
            for each in self._pairs[name]
        )
        sums = torch.empty(sizes(box), dtype=self._dtype)
        for part in cut(sums.shape, LARGEST_CHUNK):
            first = box[0].start  # Only rows are cut.
            place = slice(first + part[0].start, first + part[0].stop), *box[1:]
            all_ranks = *place[:-2], slice(None), place[-1]
            product = b[place[:-1]] @ a[all_ranks]
            sums[part] = self._weights.read(name, place).double() + self._scale * product
        return sums

    def verify(self, *, doing: str) -> None:
        """Raises RunError where what has been read is damaged, or is not the base; collective."""
        self._adapters.verify(doing=doing)
        self._base.verify(doing=doing)
        if self._weights.digest(doing=doing) != self._manifest.base:
            raise RunError(
                f"{self._checkpoint} has adapters of other weights: name theirs with --base"
            )


def merge(
    checkpoint: Path,
    target: Path,
    dtype: torch.dtype | None,
    base: Path | None = None,
    ends_of: EndsOf = no_ends,
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
    found = on_every_rank(lambda: _open(manifest, checkpoint, base), doing=doing)
    folders = [*found.folders, *asset_folders(checkpoint, manifest.job)]
    dtype = dtype or on_every_rank(
        lambda: published_type(origin_of(found.model, folders)), doing=doing
    )
    merged = on_every_rank(lambda: _Merged(found, checkpoint, manifest, dtype), doing=doing)
    source = found._replace(read=merged.read, folders=folders, verify=merged.verify)
    num_bytes = export(source, target, dtype, **tokenizer_arguments(checkpoint, manifest, ends_of))
    return speed_line(f"merged {target}", num_bytes, started)


def _open(manifest: Manifest, checkpoint: Path, named: Path | None) -> Source:
    """The base. Raises RunError when it is not of the adapters' model."""
    if not manifest.base:
        raise RunError(f"{checkpoint} holds no adapters: titan-moe hf export writes its model")
    name = named or base_of(manifest.job)
    if name is None:
        raise RunError(f"{checkpoint} does not name the weights that it began with: give --base")
    path, ours = Path(name), model_of_manifest(manifest, checkpoint)
    if is_hf_folder(path):
        base = folder_source(path)
    else:
        of_base = read_manifest(path)
        refuse_adapters(of_base, path)
        base = checkpoint_source(path, of_base)
    families = f"a {base.model.family} model, not {ours.family}"
    lines = [families] if base.model.family != ours.family else []
    if lines := lines or differences(ours.config, base.model.config):
        raise RunError(f"{path} is not the base of {checkpoint}: {', '.join(lines)}")
    if lost := sorted(pairs_of(shapes_of_manifest(manifest)).keys() - base.shapes.keys()):
        raise RunError(f"{path} has no {', '.join(lost[:4])}, which {checkpoint} has adapters of")
    return base
