"""Weights to Hugging Face folders, from checkpoints or a running model.

All ranks agree on the files and on the rank that writes each of them, whole tensors at a time. The
folder gets its name when everything in it is on disk.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from titan_moe.checkpoint.checksums import as_digits, box_sum
from titan_moe.checkpoint.folder import fsync, new_folder, write_json
from titan_moe.checkpoint.hf.assets import asset_folders, original_dtype, write_assets
from titan_moe.checkpoint.hf.folder import INDEX, SINGLE
from titan_moe.checkpoint.hf.names import EXPERT_BIAS, Shapes, has_place, listed, write_as
from titan_moe.checkpoint.hf.pieces import Piece, Stored, whole
from titan_moe.checkpoint.hf.read import model_of_manifest, progress_bar, speed_line
from titan_moe.checkpoint.manifest import Manifest, compare_checksums, read_manifest
from titan_moe.checkpoint.tensors import MODEL, Chunk, StoredTensors
from titan_moe.distributed.agreement import from_every_rank, on_every_rank, on_rank_zero
from titan_moe.distributed.boxes import Box, inside, sizes
from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.transfer import execute, parts_of
from titan_moe.distributed.transfer_plan import Held, plan_transfer
from titan_moe.models.hf import HFModel
from titan_moe.runtime.errors import RunError

LARGEST_FILE = 2 * 10**9
"""Bytes of a file, but of one with a single larger tensor: the memory that writing it takes."""

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Boxes of a model's tensors, by our names."""

    def read(self, wanted: Sequence[Mapping[str, Box]], *, doing: str) -> dict[str, Tensor]:
        """This rank's of the boxes that every rank wants, on the CPU; collective."""

    def verify(self, *, doing: str) -> None:
        """Raises RunError when what has been read cannot be trusted; collective."""


class CheckpointSource:
    """The stored tensors of a checkpoint's model."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._stored = StoredTensors(folder)
        self._folder, self._manifest = folder, manifest
        self._sums: dict[tuple[str, str], int] = {}

    def read(self, wanted: Sequence[Mapping[str, Box]], *, doing: str) -> dict[str, Tensor]:
        """Each rank reads its own boxes from the files."""
        mine = wanted[dist.get_rank()]
        return on_every_rank(
            lambda: {name: self._read(MODEL + name, box) for name, box in mine.items()},
            doing=doing,
        )

    def _read(self, name: str, box: Box) -> Tensor:
        spec = self._manifest.tensors[name]
        chunk = Chunk(name, box, spec.shape, getattr(torch, spec.dtype))
        values = self._stored.read(chunk)
        # A tensor that is written twice, as a copy too, is read twice: it counts once.
        self._sums[name, str(box)] = box_sum(values, chunk)
        return values

    def verify(self, *, doing: str) -> None:
        """Compare the checksums of what has been read with the manifest's."""
        sums: dict[tuple[str, str], int] = {}
        for of_rank in from_every_rank(lambda: self._sums, doing=doing):
            sums |= of_rank
        totals: dict[str, int] = {}
        for (name, _), value in sums.items():
            totals[name] = totals.get(name, 0) + value
        found = {name: as_digits(total) for name, total in totals.items()}
        if damaged := compare_checksums(self._manifest, found):
            raise RunError(
                f"checkpoint {self._folder} is damaged: wrong checksum of {', '.join(damaged[:4])}"
            )


class ModelSource:
    """A model in the memory of all ranks; collective.

    Args:
        tensors: this rank's, by our names.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        held = parts_of(tensors)
        self._held = from_every_rank(lambda: held, doing="cannot compare tensors")
        self._parts = {
            name: [(local_part(tensor).detach(), held[name].box)]
            for name, tensor in tensors.items()
        }
        self._like = {name: part for of_rank in self._held for name, part in of_rank.items()}

    def read(self, wanted: Sequence[Mapping[str, Box]], *, doing: str) -> dict[str, Tensor]:
        """The ranks send each other what they hold of the boxes."""
        boxes = [
            {name: self._like[name]._replace(box=box) for name, box in of_rank.items()}
            for of_rank in wanted
        ]
        names = set().union(*wanted)
        held = [{name: part for name, part in own.items() if name in names} for own in self._held]
        try:
            plan = plan_transfer(held, boxes)
        except ValueError as error:
            raise RunError(f"{doing}: {error}") from None
        mine = {name: self._empty(part) for name, part in boxes[dist.get_rank()].items()}
        targets = {name: [(mine[name], wanted[dist.get_rank()][name])] for name in mine}
        execute(plan, self._parts, targets)
        return mine

    def _empty(self, part: Held) -> Tensor:
        return torch.empty(sizes(part.box), dtype=part.dtype)

    def verify(self, *, doing: str) -> None:
        """Memory is trusted."""


class Written(NamedTuple):
    """A tensor of theirs, and the boxes of ours that it is made of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[str, Piece]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


File = dict[str, Written]


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
    dtype = dtype or original_dtype(folders)
    source = on_every_rank(lambda: CheckpointSource(checkpoint, manifest), doing=doing)
    num_bytes = export(model, shapes, source, target, dtype=dtype, folders=folders)
    return speed_line(f"exported {target}", num_bytes, started)


def save_hf(
    target: Path,
    model: HFModel,
    tensors: Mapping[str, Tensor],
    shapes: Shapes,
    *,
    dtype: torch.dtype,
    job_record: Mapping[str, Any],
) -> None:
    """Export a running model; collective. Raises as `export`."""
    started = time.perf_counter()
    folders = asset_folders(None, job_record)
    num_bytes = export(model, shapes, ModelSource(tensors), target, dtype=dtype, folders=folders)
    if dist.get_rank() == 0:
        logger.info(speed_line(f"exported {target}", num_bytes, started))


def export(
    model: HFModel,
    shapes: Shapes,
    source: Source,
    target: Path,
    *,
    dtype: torch.dtype,
    folders: Sequence[Path],
) -> int:
    """Write a Hugging Face folder; returns its tensors' bytes. Collective.

    Args:
        shapes: of all our tensors, whole; the same on every rank.
        dtype: of the floating-point tensors; the routing's bias stays float32.
        folders: where to look for the tokenizer's files, the likeliest first.

    Raises RunError when the target exists, when a tensor has no place in that form, when a tensor
    is not held whole by the ranks together, or when it cannot be written: nothing is left then.
    """
    doing = f"cannot export to {target}"
    on_every_rank(model.settings, doing=doing)
    files = plan_files(write_as(model, shapes), dtype)
    _refuse_lost_bias(model, shapes, source, doing)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = sum(tensor.nbytes for file in files.values() for tensor in file.values())
    with new_folder(target, total, doing=doing) as aside, progress_bar("export", total) as bar:
        names = list(files)
        for first in range(0, len(names), ranks):
            group = [files[name] for name in names[first : first + ranks]]
            group += [{}] * (ranks - len(group))
            wanted = [_boxes(file) for file in group]
            values = source.read(wanted, doing=doing)
            name = names[first + rank] if group[rank] else ""
            write = partial(_write, aside / name, group[rank], values, wanted[rank])
            on_every_rank(write, doing=doing)
            bar.update(sum(tensor.nbytes for file in group for tensor in file.values()))
        source.verify(doing=doing)
        on_rank_zero(lambda: _finish(model, files, folders, dtype, aside), doing=doing)
    return total


def plan_files(targets: Mapping[str, list[Stored]], dtype: torch.dtype) -> dict[str, File]:
    """Files of at most LARGEST_FILE bytes by name. A file of one larger tensor holds it alone."""
    tensors: File = {}
    for name, ways in targets.items():
        of_type = torch.float32 if name.endswith(EXPERT_BIAS) else dtype
        for way in ways:
            for theirs, shape in way.tensors().items():
                tensors.setdefault(theirs, Written(shape, of_type, []))
            for piece in way.pieces(whole(way.shape)):
                tensors[piece.tensor].pieces.append((name, piece))
    files: list[File] = [{}]
    filled = 0
    for theirs, tensor in tensors.items():
        if files[-1] and filled + tensor.nbytes > LARGEST_FILE:
            files.append({})
            filled = 0
        files[-1][theirs] = tensor
        filled += tensor.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": file
        for number, file in enumerate(files, 1)
    }


def _boxes(file: File) -> dict[str, Box]:
    """The boxes of our tensors that a file is made of: of a stack of experts those in the file."""
    boxes: dict[str, Box] = {}
    for tensor in file.values():
        for name, piece in tensor.pieces:
            before = boxes.get(name, piece.ours)
            boxes[name] = tuple(
                slice(min(a.start, b.start), max(a.stop, b.stop))
                for a, b in zip(before, piece.ours, strict=True)
            )
    return boxes


def _write(path: Path, file: File, values: Mapping[str, Tensor], boxes: Mapping[str, Box]) -> None:
    if not file:  # There are fewer files than ranks.
        return
    tensors = {}
    for theirs, tensor in file.items():
        tensors[theirs] = torch.empty(tensor.shape, dtype=tensor.dtype)
        for name, piece in tensor.pieces:
            part = values[name][inside(piece.ours, boxes[name])]
            if piece.transposed:
                part = part.transpose(-1, -2)
            place = tensors[theirs][piece.theirs]
            place.copy_(part.reshape(place.shape))
            is_float16 = tensor.dtype == torch.float16
            if is_float16 and part.isfinite().all() and not place.isfinite().all():
                raise RunError(f"{theirs} has values that float16 cannot hold: export bfloat16")
    save_file(tensors, path, metadata={"format": "pt"})
    fsync(path)


def _refuse_lost_bias(model: HFModel, shapes: Shapes, source: Source, doing: str) -> None:
    """Raises RunError for a bias of the routing that is not zero and has no place."""
    biases = {
        name: whole(shape)
        for name, shape in shapes.items()
        if name.endswith(EXPERT_BIAS) and not has_place(model, name)
    }
    values = source.read([biases] * dist.get_world_size(), doing=doing)
    if lost := [name for name, bias in values.items() if bias.count_nonzero()]:
        raise RunError(
            f"{listed(lost)}: a routing bias that is not zero has no place in the Hugging Face "
            f"form of {model.family} with {model.config.moe and model.config.moe.score} scores"
        )


def _finish(
    model: HFModel,
    files: Mapping[str, File],
    folders: Sequence[Path],
    dtype: torch.dtype,
    aside: Path,
) -> None:
    """Write the index and all that lies beside the weights."""
    if len(files) > 1:
        total = sum(tensor.nbytes for file in files.values() for tensor in file.values())
        places = {name: path for path, file in files.items() for name in file}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_json(aside / INDEX, index)
    write_assets(model, folders, dtype, aside)
