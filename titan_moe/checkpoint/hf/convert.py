"""Hugging Face folder -> checkpoint, and back, with no model and a few chunks in memory.

Both are collective, over one process or many: each takes a share of the chunks.
"""

import shutil
import time
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint import storage
from titan_moe.checkpoint.agreement import on_every_rank, on_rank_zero
from titan_moe.checkpoint.checksum import as_digits, box_sum
from titan_moe.checkpoint.hf.assets import HF, asset_folders, copy_assets, write_assets
from titan_moe.checkpoint.hf.folder import HFFolder
from titan_moe.checkpoint.hf.names import EXPERT_BIAS, PREVIOUS_LOAD, Shapes, find
from titan_moe.checkpoint.hf.pieces import Box, Stored, cut, key, lengths, whole
from titan_moe.checkpoint.hf.progress import Progress, speed_line
from titan_moe.checkpoint.hf.reading import read_box_of
from titan_moe.checkpoint.hf.shapes import model_shapes
from titan_moe.checkpoint.hf.streamed import Chunk, write_streamed
from titan_moe.checkpoint.hf.writing import export, refuse_existing, refuse_full_disk
from titan_moe.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    TensorSpec,
    code_version,
    compare_checksums,
    read_manifest,
)
from titan_moe.checkpoint.safe_reader import SafeReader
from titan_moe.checkpoint.tensors import MODEL
from titan_moe.config.errors import ConfigError
from titan_moe.models.hf import HFModel, as_record, from_record, model_of, read_settings
from titan_moe.models.registry import model_config
from titan_moe.runtime.errors import RunError

# Elements of a chunk of an imported checkpoint: 256 MB in float32.
_LARGEST_CHUNK = 2**26

_BUFFERS = (EXPERT_BIAS, PREVIOUS_LOAD)


def import_folder(folder: Path, out: Path, dtype: torch.dtype) -> str:
    """Write a Hugging Face folder's weights as a checkpoint that holds the model only; returns a
    line that says how fast.

    What lies beside the weights is kept in its folder `hf`.

    Raises ConfigError or RunError in one line each; nothing is left then.
    """
    started = time.perf_counter()
    doing = f"cannot import {folder}"
    model, opened, found = on_every_rank(lambda: _open(folder), doing=doing)
    shapes = model_shapes(model.config)
    needed = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
    aside = on_rank_zero(lambda: _begin(out, needed), doing=doing)
    try:
        with opened:
            sums = _write_chunks(model, opened, found, shapes, aside, dtype)
        on_rank_zero(lambda: _commit(aside, out, folder, model, shapes, dtype, sums), doing=doing)
    except BaseException:
        if dist.get_rank() == 0:
            storage.abandon(aside)
        raise
    return speed_line(f"imported {out}", opened.num_bytes, started)


def _open(folder: Path) -> tuple[HFModel, HFFolder, dict[str, Stored]]:
    model = model_of(folder)
    opened = HFFolder(folder)
    return model, opened, find(model, opened, model_shapes(model.config))


def _begin(out: Path, needed: int) -> Path:
    refuse_existing(out)
    refuse_full_disk(out, needed)
    aside = out.with_name(f".{out.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)  # Of an import that was killed.
    aside.mkdir()
    return aside


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith(_BUFFERS) else dtype


def _write_chunks(
    model: HFModel,
    folder: HFFolder,
    found: Mapping[str, Stored],
    shapes: Shapes,
    aside: Path,
    dtype: torch.dtype,
) -> dict[str, str]:
    """Write all tensors; returns their checksums."""
    chunks = [
        Chunk(MODEL + name, box, shape, _dtype_of(name, dtype))
        for name, shape in shapes.items()
        for box in cut(whole(shape), _LARGEST_CHUNK)
    ]
    mine = _share([(chunk, prod(lengths(chunk.box))) for chunk in chunks])
    sums: dict[str, int] = defaultdict(int)
    total = sum(prod(lengths(chunk.box)) * chunk.dtype.itemsize for chunk in mine)
    with Progress("import", total) as progress:

        def make(chunk: Chunk) -> Tensor:
            values = _values(model, folder, found, chunk)
            sums[chunk.name] += box_sum(values, [part.start for part in chunk.box], chunk.shape)
            progress.advance(values.numel() * values.element_size())
            return values

        on_every_rank(
            lambda: write_streamed(aside, mine, make), doing=f"cannot write {aside.parent}"
        )
    return {name: as_digits(total) for name, total in _added(sums).items()}


def _values(model: HFModel, folder: HFFolder, found: Mapping[str, Stored], chunk: Chunk) -> Tensor:
    name = chunk.name.removeprefix(MODEL)
    if name in found:
        return read_box_of(found[name], chunk.box, folder, chunk.dtype)
    # Nothing has been routed yet: an even load, and no bias.
    assert model.config.moe is not None and name.endswith(_BUFFERS), name
    even = 1 / model.config.moe.num_experts if name.endswith(PREVIOUS_LOAD) else 0.0
    return torch.full(lengths(chunk.box), even, dtype=chunk.dtype)


def _commit(
    aside: Path,
    out: Path,
    folder: Path,
    model: HFModel,
    shapes: Shapes,
    dtype: torch.dtype,
    sums: dict[str, str],
) -> None:
    SafeReader(aside)
    copy_assets(folder, aside / HF)
    manifest = Manifest(
        step=0,
        model_only=True,
        num_experts=model.config.moe.num_experts if model.config.moe else 0,
        tensors={
            MODEL + name: TensorSpec(
                shape=shape, dtype=str(_dtype_of(name, dtype)).removeprefix("torch.")
            )
            for name, shape in shapes.items()
        },
        checksums=sums,
        job={"model": {"name": model.family, "flavor": "hf"}},
        code=code_version(),
        family=model.family,
        model=as_record(model.config),
    )
    storage.write_json(aside / MANIFEST, manifest.model_dump(mode="json"))
    refuse_existing(out)
    storage.commit(aside, out)


def export_checkpoint(checkpoint: Path, target: Path, dtype: torch.dtype | None) -> str:
    """Write a checkpoint's model as a Hugging Face folder; returns a line that says how fast.

    Args:
        dtype: None for that of the weights that were imported, else bfloat16.

    Raises ConfigError or RunError in one line each; nothing is left then.
    """
    started = time.perf_counter()
    doing = f"cannot export {checkpoint}"
    manifest = on_every_rank(lambda: read_manifest(checkpoint), doing=doing)
    model = on_every_rank(lambda: model_of_manifest(manifest, checkpoint), doing=doing)
    shapes = {
        name.removeprefix(MODEL): spec.shape
        for name, spec in manifest.tensors.items()
        if name.startswith(MODEL)
    }
    folders = asset_folders(checkpoint, manifest.job)
    of_type = dtype or _original_dtype(folders)
    source = on_every_rank(lambda: CheckpointSource(checkpoint, manifest), doing=doing)
    num_bytes = export(
        model,
        shapes,
        source,
        target,
        dtype=of_type,
        write_assets=lambda aside: write_assets(model, folders, of_type, aside),
    )
    return speed_line(f"exported {target}", num_bytes, started)


def model_of_manifest(manifest: Manifest, checkpoint: Path) -> HFModel:
    """Family and dimensions of a checkpoint. Raises RunError or ConfigError."""
    named = manifest.job.get("model", {})
    if manifest.model:
        return HFModel(manifest.family, from_record(manifest.model))
    if not named.get("name"):
        raise RunError(f"{checkpoint / MANIFEST} does not say which model it is of")
    # Before dimensions were kept: those that the flavor has now.
    return HFModel(named["name"], model_config(named["name"], named["flavor"]))


def _original_dtype(folders: list[Path]) -> torch.dtype:
    for folder in folders:
        try:
            settings = read_settings(folder)
        except ConfigError:
            continue
        named = settings.get("torch_dtype") or settings.get("dtype")
        if isinstance(found := getattr(torch, str(named), None), torch.dtype):
            return found
    return torch.bfloat16


class CheckpointSource:
    """The stored chunks of a checkpoint, a share of them on each rank (writing.Source)."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._reader = SafeReader(folder)
        self._folder, self._manifest = folder, manifest
        # Gate and up projections take turns in some tensors of theirs: both to one rank.
        together: dict[tuple, list[tuple[str, Box]]] = defaultdict(list)
        for name, box in self._reader.chunks(MODEL):
            pair = name.replace(".w3", ".w1").replace(".b3", ".b1")
            together[pair, key(box)].append((name, box))
        shares = [(group, len(group) * prod(lengths(group[0][1]))) for group in together.values()]
        self._boxes: dict[str, list[Box]] = defaultdict(list)
        for name, box in (one for group in _share(shares) for one in group):
            self._boxes[name.removeprefix(MODEL)].append(box)
        self._sums: dict[tuple, int] = {}

    def boxes(self) -> Mapping[str, list[Box]]:
        """This rank's share."""
        return self._boxes

    def read(self, name: str, box: Box) -> Tensor:
        """A chunk's values; what they add to the checksum is kept."""
        values = self._reader.read_chunk(MODEL + name, box)
        origin = [part.start for part in box]
        shape = self._manifest.tensors[MODEL + name].shape
        self._sums[name, key(box)] = box_sum(values, origin, shape)
        return values

    def finish(self) -> None:
        """Compare what has been read with the manifest's checksums; collective."""
        sums: dict[str, int] = defaultdict(int)
        for (name, _), value in self._sums.items():
            sums[MODEL + name] += value
        found = {name: as_digits(total) for name, total in _added(sums).items()}
        if damaged := compare_checksums(self._manifest, found):
            raise RunError(
                f"checkpoint {self._folder} is damaged: wrong checksum of {', '.join(damaged[:4])}"
            )


def _share(weighted: list[tuple]) -> list:
    """This rank's share of things with a weight: always the lightest rank gets the next."""
    loads = [0] * dist.get_world_size()
    mine = []
    for thing, weight in weighted:
        lightest = loads.index(min(loads))
        loads[lightest] += weight
        if lightest == dist.get_rank():
            mine.append(thing)
    return mine


def _added(sums: Mapping[str, int]) -> dict[str, int]:
    """Sums by name over all ranks; collective."""
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(sums))
    names = sorted(set().union(*everyone))
    return {name: sum(own.get(name, 0) for own in everyone) for name in names}
