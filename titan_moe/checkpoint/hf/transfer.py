"""Weights from and to Hugging Face folders: checkpoints, a running model, a whole model alone.

Checkpoints are converted with no model and a few chunks in memory. All but `load_alone` is
collective, over one process or many; no rank gives tensors to another.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.checksums import box_sum
from titan_moe.checkpoint.digests import check_listed
from titan_moe.checkpoint.folder import new_folder, write_json
from titan_moe.checkpoint.hf.assets import (
    HF,
    asset_folders,
    copy_assets,
    original_dtype,
    write_assets,
)
from titan_moe.checkpoint.hf.folder import HFFolder, is_hf_folder
from titan_moe.checkpoint.hf.names import EXPERT_BIAS, PREVIOUS_LOAD, Shapes, model_shapes
from titan_moe.checkpoint.hf.pieces import lengths, relative
from titan_moe.checkpoint.hf.sources import (
    CheckpointSource,
    HFSource,
    ModelSource,
    Source,
    fill,
    progress_bar,
    total_checksums,
)
from titan_moe.checkpoint.hf.write_folder import export
from titan_moe.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    TensorSpec,
    audit,
    code_version,
    read_manifest,
)
from titan_moe.checkpoint.tensors import MODEL, Chunk, write_chunks
from titan_moe.distributed.agreement import on_every_rank, on_rank_zero
from titan_moe.distributed.dtensor import local_slices
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder, move_off_meta
from titan_moe.models.hf import HFModel, as_record, differences, from_record, model_of
from titan_moe.models.registry import model_config
from titan_moe.runtime.errors import RunError

logger = logging.getLogger(__name__)


def import_folder(folder: Path, out: Path, dtype: torch.dtype) -> str:
    """Write a Hugging Face folder's weights as a checkpoint that holds the model only; returns a
    line that says how fast.

    What lies beside the weights is kept in its folder `hf`.

    Raises ConfigError or RunError in one line each; nothing is left then.
    """
    started = time.perf_counter()
    doing = f"cannot import {folder}"
    model = on_every_rank(lambda: model_of(folder), doing=doing)
    check_listed(folder, doing=doing)
    shapes = model_shapes(model.config)
    opened = on_every_rank(lambda: HFFolder(folder), doing=doing)
    with opened:
        source = on_every_rank(lambda: HFSource(opened, model, shapes), doing=doing)
        needed = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
        with new_folder(out, needed, doing=doing) as aside:
            sums = _write_chunks(source, shapes, aside, out, dtype)

            def describe() -> None:
                copy_assets(folder, aside / HF)
                manifest = _manifest(model, shapes, dtype, sums)
                write_json(aside / MANIFEST, manifest.model_dump(mode="json"))

            on_rank_zero(describe, doing=doing)
    return _speed_line(f"imported {out}", opened.num_bytes, started)


def _write_chunks(
    source: HFSource, shapes: Shapes, aside: Path, out: Path, dtype: torch.dtype
) -> dict[str, str]:
    """Write all tensors; returns their checksums."""
    mine = [
        Chunk(MODEL + name, box, shapes[name], _dtype_of(name, dtype))
        for name, boxes in source.boxes().items()
        for box in boxes
    ]
    sums = {chunk.name: 0 for chunk in mine}
    total = sum(prod(lengths(chunk.box)) * chunk.dtype.itemsize for chunk in mine)
    with progress_bar("import", total) as bar:

        def make(chunk: Chunk) -> Tensor:
            values = read_chunk(source, chunk)
            sums[chunk.name] += box_sum(values, chunk)
            bar.update(values.numel() * values.element_size())
            return values

        write_chunks(aside, mine, make, doing=f"cannot write {out}")
    return total_checksums(sums)


def read_chunk(source: HFSource, chunk: Chunk) -> Tensor:
    """The values of a chunk, on the CPU."""
    values = torch.empty(lengths(chunk.box), dtype=chunk.dtype)
    for at, part in source.read(chunk.name.removeprefix(MODEL), chunk.box):
        values[relative(at, chunk.box)].copy_(part)
    return values


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith((EXPERT_BIAS, PREVIOUS_LOAD)) else dtype


def _manifest(model: HFModel, shapes: Shapes, dtype: torch.dtype, sums: dict[str, str]) -> Manifest:
    return Manifest(
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
    of_type = dtype or original_dtype(folders)
    source = on_every_rank(
        lambda: CheckpointSource(checkpoint, manifest, checksums=True), doing=doing
    )
    num_bytes = export(
        model,
        shapes,
        source,
        target,
        dtype=of_type,
        write_assets=lambda aside: write_assets(model, folders, of_type, aside),
    )
    return _speed_line(f"exported {target}", num_bytes, started)


def model_of_manifest(manifest: Manifest, checkpoint: Path) -> HFModel:
    """Family and dimensions of a checkpoint, whose tensors are those of such a model. Raises
    RunError or ConfigError."""
    named = manifest.job.get("model", {})
    if manifest.model:
        model = HFModel(manifest.family, from_record(manifest.model))
    elif named.get("name"):
        # Before dimensions were kept: those that the flavor has now.
        model = HFModel(named["name"], model_config(named["name"], named["flavor"]))
    else:
        raise RunError(f"{checkpoint / MANIFEST} does not say which model it is of")
    layers = model.config.num_layers + model.config.num_mtp_layers
    if layers > len(manifest.tensors):  # Any number of them could be built.
        told = f"it has {len(manifest.tensors)} tensors for {layers} layers"
        raise RunError(f"checkpoint {checkpoint} does not fit its model: {told}")
    wanted = {MODEL + name: shape for name, shape in model_shapes(model.config).items()}
    specs = {
        name: TensorSpec(shape=shape, dtype=manifest.tensors[name].dtype)
        if name in manifest.tensors
        else TensorSpec(shape=shape, dtype="")
        for name, shape in wanted.items()
    }
    experts = model.config.moe.num_experts if model.config.moe else 0
    if problems := audit(manifest, specs, [MODEL], experts):
        raise RunError(f"checkpoint {checkpoint} does not fit its model: {'; '.join(problems)}")
    return model


def load_hf(folder: Path, model: HFModel, tensors: Mapping[str, Tensor], shapes: Shapes) -> None:
    """Fill a model's tensors, each rank its own parts; those that the folder does not have stay.

    Args:
        tensors: this rank's, by our names.
        shapes: of all ranks' tensors, whole.

    Raises RunError in one line when config.json or tensors are not those of the model.
    """
    started = time.perf_counter()

    def load() -> int:
        with HFFolder(folder) as opened:
            source = HFSource(opened, model, shapes)
            boxes = {
                name: [local_slices(tensor)]
                for name, tensor in tensors.items()
                if name in source.found
            }
            total = sum(
                prod(lengths(box)) * tensors[name].element_size() for name, (box,) in boxes.items()
            )
            with progress_bar("import", total) as bar:
                fill(tensors, boxes, source, bar.update)
            return opened.num_bytes

    doing = f"cannot load {folder}"
    on_every_rank(lambda: _refuse_other_dimensions(model, folder), doing=doing)
    check_listed(folder, doing=doing)
    num_bytes = on_every_rank(load, doing=doing)
    if dist.get_rank() == 0:
        logger.info(_speed_line(f"loaded {folder}", num_bytes, started))


def _refuse_other_dimensions(model: HFModel, folder: Path) -> None:
    theirs = model_of(folder)
    if theirs.family != model.family:
        raise RunError(
            f"{folder} holds a model of the family {theirs.family}: set model.name={theirs.family}"
        )
    if lines := differences(model.config, theirs.config):
        raise RunError(
            f"{folder} does not fit the model: {', '.join(lines)}; model.flavor=hf with "
            f"model.hf_assets_path={folder} takes its dimensions"
        )


def save_hf(
    target: Path,
    model: HFModel,
    tensors: Mapping[str, Tensor],
    shapes: Shapes,
    *,
    dtype: torch.dtype,
    job_record: Mapping[str, Any],
) -> None:
    """Export a running model. `write_folder.export` says what is raised."""
    started = time.perf_counter()
    folders = asset_folders(None, job_record)
    num_bytes = export(
        model,
        shapes,
        ModelSource(tensors),
        target,
        dtype=dtype,
        write_assets=lambda aside: write_assets(model, folders, dtype, aside),
    )
    if dist.get_rank() == 0:
        logger.info(_speed_line(f"exported {target}", num_bytes, started))


class Loaded(NamedTuple):
    """A model to evaluate, and the tokenizers that may be its own, the likeliest first."""

    model: Decoder
    tokenizers: list[str]
    """As model.tokenizer_path."""


def load_alone(path: Path, *, dtype: torch.dtype, device: torch.device) -> Loaded:
    """Build and fill the whole model of a step-N folder or of a Hugging Face folder, in this
    process alone.

    Layers of multi-token prediction are left out: they serve training alone. Raises RunError or
    ConfigError in one line each.
    """
    if is_hf_folder(path):
        wanted = _without_mtp(model_of(path))
        with HFFolder(path) as folder:
            hf_source = HFSource(folder, wanted, model_shapes(wanted.config))
            return Loaded(_filled(wanted.config, hf_source, dtype, device), [str(path)])
    manifest = read_manifest(path)
    wanted = _without_mtp(model_of_manifest(manifest, path))
    source = CheckpointSource(path, manifest, checksums=False)
    model = _filled(wanted.config, source, dtype, device)
    named = [str(folder) for folder in asset_folders(path, manifest.job)]
    written = manifest.job.get("model", {}).get("tokenizer_path")
    return Loaded(model, [*([written] if written else []), *named])


def _without_mtp(model: HFModel) -> HFModel:
    return HFModel(model.family, replace(model.config, num_mtp_layers=0))


def _filled(
    config: ModelConfig, source: Source, dtype: torch.dtype, device: torch.device
) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    for parameter in model.parameters():  # Buffers keep their own types.
        parameter.data = parameter.data.to(dtype)
    move_off_meta(model, device, parameter_device=device)
    tensors = model.state_dict(keep_vars=True)
    fill(tensors, {n: own for n, own in source.boxes().items() if n in tensors}, source)
    return model.eval()


def _speed_line(what: str, num_bytes: int, started: float) -> str:
    seconds = time.perf_counter() - started
    gigabytes = num_bytes / 1e9
    return f"{what}: {gigabytes:.2f} GB in {seconds:.1f} s, {gigabytes / seconds:.2f} GB/s"
