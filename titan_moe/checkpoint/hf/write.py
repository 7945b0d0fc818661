"""Writes the weights of a checkpoint as a Hugging Face folder.

All ranks agree on the files and on the rank that writes each of them, whole tensors at a time. The
folder gets its name when everything in it is on disk.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.checksums import box_sum, total_sums
from titan_moe.checkpoint.digests import MANIFEST, damage, write_sums
from titan_moe.checkpoint.folder import new_folder
from titan_moe.checkpoint.hf.assets import HF, Ends, asset_folders, origin_of, write_assets
from titan_moe.checkpoint.hf.folder import INDEX, REST, HFFolder, save
from titan_moe.checkpoint.hf.names import EXPERT_BIAS, Shapes, write_as
from titan_moe.checkpoint.hf.pieces import Piece, Stored, whole
from titan_moe.checkpoint.hf.read import model_of_manifest, progress_bar, speed_line, tokenizers_of
from titan_moe.checkpoint.manifest import Manifest, compare_checksums, read_manifest
from titan_moe.checkpoint.tensors import MODEL, Chunk, StoredTensors
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.distributed.agreement import from_every_rank, on_every_rank, on_rank_zero
from titan_moe.distributed.boxes import Box, inside
from titan_moe.models.decoder import is_wide
from titan_moe.models.hf import HFModel, read_settings, wrapper_of
from titan_moe.runtime.errors import RunError, listed

logger = logging.getLogger(__name__)

LARGEST_FILE = 2 * 10**9
"""Bytes of a file, but of one with a single larger tensor: the memory that writing it takes."""


Read = Callable[[str, Box], Tensor]
"""Reads a box of one of our tensors, on this rank."""
EndsOf = Callable[[str, Training], Mapping[str, int]]
"""Returns the `Ends` of a model.tokenizer_path, for documents as these keys say; empty where there
is no tokenizer."""


class CheckpointSource:
    """The model's tensors in a checkpoint, with the checksums of what has been read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._stored = StoredTensors(folder)
        self._folder, self._manifest = folder, manifest
        self._sums: dict[tuple[str, str], int] = {}

    def read(self, name: str, box: Box) -> Tensor:
        """Returns a box of a tensor, on the CPU."""
        spec = self._manifest.tensors[MODEL + name]
        chunk = Chunk(MODEL + name, box, spec.shape, getattr(torch, spec.dtype))
        values = self._stored.read(chunk)
        # A tensor that is written twice, as a copy too, is read twice: it counts once.
        self._sums[MODEL + name, str(box)] = int(box_sum(values, chunk))
        return values

    def verify(self, *, doing: str) -> None:
        """Compare the checksums of what all ranks have read with the manifest's; collective."""
        sums: dict[tuple[str, str], int] = {}
        for of_rank in from_every_rank(lambda: self._sums, doing=doing):
            sums |= of_rank
        found = total_sums((name, value) for (name, _), value in sums.items())
        if damaged := compare_checksums(self._manifest, found):
            raise RunError(
                f"checkpoint {self._folder} is damaged: wrong checksum of {', '.join(damaged[:4])}"
            )


class Written(NamedTuple):
    """A Hugging Face tensor, and the boxes of our tensors that it is made of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[str, Piece]]
    rest: Any = None
    """In place of pieces: a slice of the library, all of which is written as it is."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


File = dict[str, Written]


def no_ends(path: str, training: Training) -> Mapping[str, int]:
    """Reads no tokenizer."""
    return {}


def export_checkpoint(
    checkpoint: Path, target: Path, dtype: torch.dtype, ends_of: EndsOf = no_ends
) -> str:
    """Write a checkpoint's model as a Hugging Face folder; returns a line that says how fast.
    Collective.

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
    source = on_every_rank(lambda: CheckpointSource(checkpoint, manifest), doing=doing)
    names, training = tokenizers_of(checkpoint, manifest)
    num_bytes = export(
        model,
        shapes,
        source.read,
        target,
        dtype=dtype,
        folders=asset_folders(checkpoint, manifest.job),
        ends=lambda: next(filter(None, (ends_of(name, training) for name in names)), {}),
        tokenizer=manifest.job.get("model", {}).get("tokenizer_path"),
        verify=source.verify,
    )
    return speed_line(f"exported {target}", num_bytes, started)


def export(
    model: HFModel,
    shapes: Shapes,
    read: Read,
    target: Path,
    *,
    dtype: torch.dtype,
    folders: Sequence[Path] = (),
    ends: Ends = dict,
    tokenizer: str | None = None,
    verify: Callable[..., None] = lambda doing: None,
) -> int:
    """Write a Hugging Face folder; returns its tensors' bytes. Collective.

    Args:
        shapes: of all our tensors, whole; the same on every rank.
        dtype: of the floating-point tensors, but for those that published code keeps in float32.
        folders: where to look for the tokenizer's files, the likeliest first.
        ends: the tokenizer's, asked where no folder names a token that ends a text.
        tokenizer: the run's model.tokenizer_path, whose files come along.
        verify: raises RunError if what has been read cannot be trusted; collective.

    Raises RunError when the target exists, when a tensor has no place in that form, or when it
    cannot be written: nothing is left then.
    """
    doing = f"cannot export to {target}"
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
    tensors = _tensors(targets, dtype, rest)
    split = _split(tensors)
    mine = list(split.filename_to_tensors.items())[dist.get_rank() :: dist.get_world_size()]
    with new_folder(target, split.metadata["total_size"], doing=doing) as aside:

        def write() -> None:
            with progress_bar("export", len(mine), "file") as bar:
                for file, names in mine:
                    _write(aside / file, {name: tensors[name] for name in names}, read)
                    bar.update()

        def write_rest() -> None:
            if split.is_sharded:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                (aside / INDEX).write_text(json.dumps(index, sort_keys=True))
            write_assets(model, origin, folders, ends, dtype, aside, tokenizer)

        on_every_rank(write, doing=doing)
        verify(doing=doing)
        on_rank_zero(write_rest, doing=doing)
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


def _tensors(
    targets: Mapping[str, list[Stored]], dtype: torch.dtype, rest: Mapping[str, Any]
) -> File:
    """Returns all tensors of an export by name.

    Args:
        rest: further tensors, as `HFFolder.rest` returns them.
    """
    tensors: File = {}
    for name, ways in targets.items():
        of_type = torch.promote_types(dtype, torch.float32) if _is_wide(name, targets) else dtype
        of_type = torch.float32 if name.endswith(EXPERT_BIAS) else of_type
        for way in ways:
            for theirs, shape in way.tensors().items():
                tensors.setdefault(theirs, Written(shape, of_type, []))
            for piece in way.pieces(whole(way.shape)):
                tensors[piece.tensor].pieces.append((name, piece))
    for name, stored in rest.items():
        shape = tuple(stored.get_shape())
        tensors[name] = Written(shape, stored[0:0].dtype if shape else stored[()].dtype, [], stored)
    return tensors


def _split(tensors: File) -> Any:
    """Returns the names of tensors by file, of at most LARGEST_FILE bytes. A file of one larger
    tensor holds it alone."""
    from huggingface_hub import split_state_dict_into_shards_factory  # It takes a while.

    return split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=LARGEST_FILE,
    )


def _is_wide(name: str, targets: Mapping[str, list[Stored]]) -> bool:
    """Returns whether published code keeps a parameter at least in float32: decay rates, and the
    weights of routers that have a routing bias."""
    layer, is_router, _ = name.partition(".router.gate.weight")
    return is_wide(name) or (bool(is_router) and layer + EXPERT_BIAS in targets)


def _boxes(file: File) -> dict[str, Box]:
    """Returns the boxes of our tensors that a file holds: of a stack, those of its experts."""
    boxes: dict[str, Box] = {}
    for tensor in file.values():
        for name, piece in tensor.pieces:
            before = boxes.get(name, piece.ours)
            boxes[name] = tuple(
                slice(min(a.start, b.start), max(a.stop, b.stop))
                for a, b in zip(before, piece.ours, strict=True)
            )
    return boxes


def _write(path: Path, file: File, read: Read) -> None:
    boxes = _boxes(file)
    values = {name: read(name, box) for name, box in boxes.items()}
    tensors = {}
    for theirs, tensor in file.items():
        if tensor.rest is not None:
            tensors[theirs] = tensor.rest[()]
            continue
        tensors[theirs] = torch.empty(tensor.shape, dtype=tensor.dtype)
        for name, piece in tensor.pieces:
            ours = values[name][inside(piece.ours, boxes[name])]
            if piece.transposed:
                ours = ours.transpose(-1, -2)
            place = tensors[theirs][piece.theirs]
            place.copy_(ours.reshape(place.shape))
            is_float16 = tensor.dtype == torch.float16
            if is_float16 and ours.isfinite().all() and not place.isfinite().all():
                raise RunError(f"{theirs} has values that float16 cannot hold: export bfloat16")
    save(tensors, path, {})


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
