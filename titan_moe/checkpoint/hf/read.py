"""Weights from Hugging Face folders, and whole models of any folder.

Each rank reads what it holds, or its share of a checkpoint to be made; no rank gives tensors to
another. All but `load_alone` is collective, over one process or many.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.checksums import box_sum, gather_sums
from titan_moe.checkpoint.digests import MANIFEST, check_sums
from titan_moe.checkpoint.folder import new_folder
from titan_moe.checkpoint.hf.assets import HF, asset_folders, copy_assets
from titan_moe.checkpoint.hf.folder import HFFolder, Read, is_hf_folder
from titan_moe.checkpoint.hf.names import EXPERT_BIAS, PREVIOUS_LOAD, Shapes, find, model_shapes
from titan_moe.checkpoint.hf.pieces import Stored, cut, whole
from titan_moe.checkpoint.manifest import (
    Manifest,
    TensorSpec,
    compare_checksums,
    read_manifest,
    refuse_adapters,
    write_manifest,
)
from titan_moe.checkpoint.tensors import MODEL, Chunk, StoredTensors, write_chunks
from titan_moe.config.job_config import Training
from titan_moe.distributed.agreement import on_every_rank, on_rank_zero
from titan_moe.distributed.boxes import Box, inside, sizes
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import ADAPTER, Decoder, move_off_meta, stored_in
from titan_moe.models.hf import HFModel, as_record, differences, from_record, model_of
from titan_moe.models.hf_settings import TextFormat
from titan_moe.runtime.errors import RunError, reason
from titan_moe.runtime.log import log_on_rank_zero, progress

# Elements of a chunk of an imported checkpoint: 256 MB in float32.
LARGEST_CHUNK = 2**26


class HFSource:
    """The tensors of a Hugging Face folder, by our names. Raises RunError for a folder that is not
    of this model."""

    def __init__(self, folder: HFFolder, model: HFModel) -> None:
        self.found = find(model, folder)
        """Our names -> the place of each tensor; those that are not stored are left out."""
        self._folder = folder

    def copy(self, name: str, box: Box, values: Tensor) -> None:
        """Copy a box of one of our tensors into `values`, de-quantised and cast to their type.

        A box of a stack that is stored as one tensor is read whole, so a process holds a float32
        copy of its largest shard for a moment if that is quantised.
        """
        copy_pieces(self.found[name], box, values, self._folder.read)

    def read(self, name: str, box: Box) -> Tensor:
        """Returns a box of one of our tensors in the type that it is stored in, or means."""
        dtype = self._folder.dtype(min(self.found[name].tensors()))
        self.copy(name, box, values := torch.empty(sizes(box), dtype=dtype))
        return values

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill this rank's shards of tensors, plain or DTensors. Those that the folder does not
        have stay."""
        stored = {name: tensor for name, tensor in tensors.items() if name in self.found}
        for name, tensor in shown("load", stored.items(), "tensor"):
            self.copy(name, local_slices(tensor), local_part(tensor).detach())


def copy_pieces(place: Stored, box: Box, values: Tensor, read: Read) -> None:
    """Copies a box of one of our tensors into `values`; `read` returns boxes of theirs."""
    for piece in place.pieces(box):
        theirs = read(piece.tensor, piece.theirs)
        theirs = theirs.transpose(-1, -2) if piece.transposed else theirs
        target = values[inside(piece.ours, box)]
        # One side may have dims of size 1 that the other has not, such as that of experts.
        target.copy_(theirs.reshape(target.shape))


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


def model_of_manifest(manifest: Manifest, checkpoint: Path) -> HFModel:
    """Returns the family and dimensions of a checkpoint. Raises RunError if they are not known."""
    try:
        return HFModel(manifest.family, from_record(manifest.model))
    except ValueError as error:
        imports = manifest.job.get("job", {}).get("imports")
        raise RunError(
            f"{checkpoint / MANIFEST} names dimensions that are not known here ({reason(error)}); "
            f"its run had job.imports={imports}: import these modules in Python first"
        ) from None


def shapes_of_manifest(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a checkpoint's model, or of its adapters, by our names. Adapters in a
    seed checkpoint are left out: they have not trained, and change nothing."""
    return {
        name.removeprefix(MODEL): spec.shape
        for name, spec in manifest.tensors.items()
        if name.startswith(MODEL) and (manifest.base or ADAPTER not in name)
    }


def load_hf(folder: Path, model: HFModel, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's tensors of a model, by our names; those that the folder does not have stay.

    Raises RunError in one line when config.json or tensors are not those of the model.
    """
    started = time.perf_counter()

    def load() -> int:
        opened = HFFolder(folder)
        HFSource(opened, model).fill(tensors)
        return opened.num_bytes

    doing = f"cannot load {folder}"
    on_every_rank(lambda: _refuse_other_dimensions(model, folder), doing=doing)
    check_sums(folder, doing=doing)
    num_bytes = on_every_rank(load, doing=doing)
    log_on_rank_zero(speed_line(f"loaded {folder}", num_bytes, started))


def check_folder(folder: Path, model: HFModel) -> None:
    """Raises RunError or ConfigError when config.json or tensors are not those of the model."""
    _refuse_other_dimensions(model, folder)
    find(model, HFFolder(folder))


def import_folder(folder: Path, out: Path, dtype: torch.dtype) -> str:
    """Write a Hugging Face folder's weights as a checkpoint that holds the model only; returns a
    line that says how fast. Its folder `hf` keeps the files beside the weights.

    Raises ConfigError or RunError in one line each; nothing is left then.
    """
    started = time.perf_counter()
    doing = f"cannot import {folder}"
    model = on_every_rank(lambda: model_of(folder), doing=doing)
    check_sums(folder, doing=doing)
    opened = on_every_rank(lambda: HFFolder(folder), doing=doing)
    source = on_every_rank(lambda: HFSource(opened, model), doing=doing)
    chunks = []
    for name, shape in model_shapes(model.config).items():
        is_buffer = name.endswith((EXPERT_BIAS, PREVIOUS_LOAD))
        of_type = torch.float32 if is_buffer else stored_in(name, dtype)
        chunks += [Chunk(MODEL + name, box, shape, of_type) for box in cut(shape, LARGEST_CHUNK)]
    num_bytes = sum(prod(sizes(chunk.box)) * chunk.dtype.itemsize for chunk in chunks)
    with new_folder(out, num_bytes, doing=doing) as aside:
        sums = _write_share(source, model, chunks, aside, doing=f"cannot write {out}")

        def describe() -> None:
            copy_assets(folder, aside / HF)
            opened.save_rest(aside / HF)
            manifest = Manifest(
                step=0,
                model_only=True,
                tensors={each.name: TensorSpec.of(each.shape, each.dtype) for each in chunks},
                checksums=sums,
                job={"model": {"name": model.family, "flavor": "hf"}},
                family=model.family,
                model=as_record(model.config),
            )
            write_manifest(aside, manifest)

        on_rank_zero(describe, doing=doing)
    return speed_line(f"imported {out}", opened.num_bytes, started)


def _write_share(
    source: HFSource, model: HFModel, chunks: list[Chunk], aside: Path, *, doing: str
) -> dict[str, str]:
    """Write this rank's share of the chunks, every one as large as the others; returns the
    checksums of all tensors. Collective."""
    mine = chunks[dist.get_rank() :: dist.get_world_size()]
    sums: dict[tuple[str, str], int] = {}

    def make(chunk: Chunk) -> Tensor:
        values = read_chunk(source, chunk, model.config)
        sums[chunk.name, str(chunk.box)] = int(box_sum(values, chunk))
        return values

    def ahead() -> Iterator[Tensor]:
        """Yields the values of each chunk, and reads the next meanwhile, in a thread."""
        with ThreadPoolExecutor(1) as thread:
            later = thread.submit(make, mine[0])
            for following in shown("import", [*mine[1:], None], "chunk"):
                values = later.result()
                if following is not None:
                    later = thread.submit(make, following)
                yield values
                values.untyped_storage().resize_(0)  # DCP keeps it until the file is closed.

    made = ahead()
    write_chunks(aside, mine, lambda chunk: next(made), doing=doing)
    return gather_sums(sums, doing=doing)


def read_chunk(source: HFSource, chunk: Chunk, config: ModelConfig) -> Tensor:
    """The values of a chunk, on the CPU. The routing's buffers, which few folders have, get those
    of a run that begins: no bias, and an even load."""
    name, values = chunk.name.removeprefix(MODEL), torch.empty(sizes(chunk.box), dtype=chunk.dtype)
    if name not in source.found:
        assert config.moe is not None and name.endswith((EXPERT_BIAS, PREVIOUS_LOAD)), name
        return values.fill_(1 / config.moe.num_experts if name.endswith(PREVIOUS_LOAD) else 0.0)
    source.copy(name, chunk.box, values)
    return values


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


class Loaded(NamedTuple):
    """A model to evaluate, and the tokenizers that may be its own, the likeliest first."""

    model: Decoder
    tokenizers: list[str]
    """Values for model.tokenizer_path."""
    training: Training = Training()
    """The keys about conversations and the tokens around documents, as the model was trained."""
    template: str | None = None
    """The chat template in Jinja that the model was trained with, if any."""


def load_alone(path: Path, *, dtype: torch.dtype, device: torch.device) -> Loaded:
    """Build and fill the whole model of a step-N folder or of a Hugging Face folder, in this
    process alone.

    Layers of multi-token prediction are left out: they serve training alone. Raises RunError or
    ConfigError in one line each.
    """
    if is_hf_folder(path):
        wanted = model_of(path)
        model = _empty_model(wanted.config, dtype, device)
        plain = HFModel(wanted.family, model.config)
        HFSource(HFFolder(path), plain).fill(model.state_dict(keep_vars=True))
        return Loaded(model.eval(), [str(path)])
    manifest = read_manifest(path)
    refuse_adapters(manifest, path)
    model = _empty_model(model_of_manifest(manifest, path).config, dtype, device)
    stored, ours = StoredTensors(path), model.state_dict(keep_vars=True)
    for name in shapes_of_manifest(manifest):
        if name not in ours and not name.startswith("mtp."):
            raise RunError(f"checkpoint {path} holds {name}, which this model does not have")
    with torch.no_grad():
        for name, tensor in ours.items():
            spec = manifest.tensors[MODEL + name]
            chunk = Chunk(MODEL + name, whole(spec.shape), spec.shape, getattr(torch, spec.dtype))
            tensor.copy_(stored.read(chunk))
    folders = asset_folders(path, manifest.job)
    return Loaded(model.eval(), *tokenizers_of(manifest.job, folders), manifest.texts.template)


def tokenizers_of(job: Mapping[str, Any], folders: Sequence[Path]) -> tuple[list[str], Training]:
    """Returns the tokenizers that may be a model's own, the likeliest first, and how documents
    were encoded.

    Args:
        job: the configuration of its run.
        folders: where a tokenizer's files may be.
    """
    written = job.get("model", {}).get("tokenizer_path")
    names = ("append_eos", "prepend_bos", "parse_special_tokens", "messages")
    keys = job.get("training", {})
    training = Training(**{name: keys[name] for name in names if name in keys})
    return [*filter(None, [written]), *map(str, folders)], training


def _empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    with torch.device("meta"):
        model = Decoder(replace(config, num_mtp_layers=0))
    for name, parameter in model.named_parameters():  # Buffers keep their own types.
        parameter.data = parameter.data.to(stored_in(name, dtype))
    move_off_meta(model, device, parameter_device=device)
    return model


def shown(what: str, items: Iterable[Any], unit: str) -> Iterable[Any]:
    """Returns items of this rank's own work; rank 0 shows a bar as they are taken."""
    others = dist.is_initialized() and dist.get_rank() != 0
    bar: Iterable[Any] = progress(items, desc=what, unit=unit, leave=False, disable=others)
    return bar


def speed_line(what: str, num_bytes: int, started: float) -> str:
    """A line that says how fast `num_bytes` went since `started`."""
    seconds = time.perf_counter() - started
    unit, size = ("GB", num_bytes / 1e9) if num_bytes >= 1e8 else ("MB", num_bytes / 1e6)
    return f"{what}: {size:.2f} {unit} in {seconds:.1f} s, {size / seconds:.2f} {unit}/s"
