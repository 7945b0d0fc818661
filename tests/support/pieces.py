"""What ranks hold, put together into whole tensors by arithmetic alone
(titan_moe.verify.layouts.shards): neither DTensor's placements, nor DCP's metadata, nor the
checkpoint's checksums have a say in it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.checkpoint.tensors import METADATA
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.trainer import Trainer
from titan_moe.verify.layouts.shards import Box, Shards

_BUFFERS = ("expert_bias", "previous_load")
_PER_CHUNK = 2000
"""Bytes that a piece of a tensor costs besides its elements: torch.save's archive and an entry of
DCP's index."""


@dataclass
class Piece:
    """One rank's part of a tensor."""

    box: Box
    shape: tuple[int, ...]
    """Of the whole tensor."""
    bits: np.ndarray
    """The elements as unsigned integers: equal means the same bits, NaN and -0 included."""


def pieces(trainer: Trainer, shards: Shards) -> dict[str, Piece]:
    """All that this rank holds of parameters, the optimizer's state and the routers' buffers."""
    rank = dist.get_rank()
    found = {}
    for name, parameter in trainer.sharded.named_parameters():
        box = shards.box(rank, name, parameter.shape)
        state = trainer.optimizer.state[parameter]
        for kind, tensor in [("parameter", parameter), *state.items()]:
            scalar = tensor.ndim == 0
            found[f"{kind} {name}"] = Piece(
                () if scalar else box, tuple(tensor.shape), _bits(local_part(tensor.detach()))
            )
    for layer, moe in trainer.sharded.moe_layers().items():
        for buffer in _BUFFERS:
            tensor = getattr(moe.router, buffer)
            box = (slice(0, len(tensor)),)
            found[f"{buffer} {layer}"] = Piece(box, tuple(tensor.shape), _bits(tensor))
    return found


def odd_slices(trainer: Trainer, shards: Shards) -> list[str]:
    """Parameters that lie elsewhere by local_slices than by arithmetic."""
    odd = []
    for name, parameter in trainer.sharded.named_parameters():
        box, ours = shards.box(dist.get_rank(), name, parameter.shape), local_slices(parameter)
        # Where nothing lies, it does not matter where.
        if ours != box and (_volume(ours) or _volume(box)):
            odd.append(f"rank {dist.get_rank()}: {name} {ours}, by arithmetic {box}")
    return odd


def _volume(box: Box) -> int:
    return int(np.prod([part.stop - part.start for part in box]))


def _bits(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:  # Which numpy does not know.
        tensor = tensor.contiguous().view(torch.int16)
    array = np.ascontiguousarray(tensor.numpy())
    # ascontiguousarray makes a scalar a row.
    return array.view(f"u{array.itemsize}").reshape(tensor.shape).copy()


def whole(ranks: list[dict[str, Piece]]) -> dict[str, np.ndarray]:
    """Whole tensors from all ranks' pieces.

    Raises AssertionError when a tensor has a gap, or replicas of a part differ.
    """
    tensors: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for rank, pieces in enumerate(ranks):
        for name, piece in pieces.items():
            tensor = tensors.setdefault(name, np.zeros(piece.shape, piece.bits.dtype))
            seen = filled.setdefault(name, np.zeros(piece.shape, bool))
            part, known = tensor[piece.box], seen[piece.box]
            assert part.shape == piece.bits.shape, f"rank {rank}: {name} has {piece.bits.shape}"
            assert (part[known] == piece.bits[known]).all(), f"rank {rank}: {name} differs"
            tensor[piece.box] = piece.bits
            seen[piece.box] = True
    gaps = [name for name, seen in filled.items() if not seen.all()]
    assert not gaps, f"no rank holds all of {gaps}"
    return tensors


def differences(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> list[str]:
    """Names of tensors that are on one side only, or differ in any bit."""
    names = expected.keys() ^ found.keys()
    names |= {
        name
        for name in expected.keys() & found.keys()
        if not np.array_equal(expected[name], found[name])
    }
    return sorted(names)


def waste(folder: Path) -> list[str]:
    """Why a checkpoint is larger or holds less than its tensors; nothing if neither is so."""
    manifest = read_manifest(folder)
    metadata = FileSystemReader(folder).read_metadata()
    lines = []
    stored = metadata.state_dict_metadata
    if stored.keys() != manifest.tensors.keys():
        lines.append(f"manifest and files differ in {stored.keys() ^ manifest.tensors.keys()}")
    elements = chunks = 0
    for name, entry in stored.items():
        whole_size = int(np.prod(manifest.tensors[name].shape))
        size = sum(int(np.prod(chunk.sizes)) for chunk in entry.chunks)
        if size != whole_size:
            lines.append(f"{name} of {whole_size} elements takes {size}")
        elements += whole_size * entry.properties.dtype.itemsize
        chunks += len(entry.chunks)
    files = [*folder.glob("*.distcp"), folder / METADATA]
    size = sum(path.stat().st_size for path in files)
    if len(metadata.storage_data) != chunks or size > elements + _PER_CHUNK * chunks:
        written = len(metadata.storage_data)
        lines.append(f"{size} bytes for {elements} of {chunks} pieces, {written} of them written")
    return lines
