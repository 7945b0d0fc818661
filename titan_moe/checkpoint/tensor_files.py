"""A checkpoint's tensor files, in DCP's form: what torch.save makes of each chunk, one after the
other, and `.metadata`, which says where each chunk is.

Where every byte goes follows from the chunks' shapes and types. So a file can be written without
torch, by another process.
"""

import mmap
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, groupby
from math import prod
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils.serialization import config

from titan_moe.checkpoint.raw_files import Bytes, write_file
from titan_moe.checkpoint.safe_reader import METADATA
from titan_moe.checkpoint.tensors import as_array
from titan_moe.distributed.agreement import on_every_rank, on_rank_zero
from titan_moe.distributed.boxes import Box, sizes
from titan_moe.distributed.dtensor import local_part, local_slices

_LARGEST_FILE = 5 * 10**9


class Chunk(NamedTuple):
    """A box of a tensor of the checkpoint."""

    name: str
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(sizes(self.box)) * self.dtype.itemsize


class Frame(NamedTuple):
    """What torch.save writes before and after the values of a tensor."""

    before: bytes
    after: bytes


def held_chunks(tensors: Mapping[str, Tensor]) -> list[Chunk]:
    """This rank's parts; none of a part that is empty: DCP tells chunks apart by where they
    begin."""
    return [
        Chunk(name, box, tuple(tensor.shape), tensor.dtype)
        for name, tensor in tensors.items()
        if 0 not in sizes(box := local_slices(tensor)) or not tensor.numel()
    ]


def gather_chunks(own: Sequence[Chunk]) -> list[list[Chunk]]:
    """Those of every rank; collective."""
    everyone: list[list[Chunk]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, list(own))
    return everyone


def share_out(everyone: Sequence[Sequence[Chunk]]) -> list[list[Chunk]]:
    """What each rank writes of the chunks that it holds. One that several hold is written by the
    one that has the least to write so far."""
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, held in enumerate(everyone):
        for chunk in held:
            holders.setdefault(_place(chunk), []).append(rank)
    load = [sum(c.nbytes for c in held if len(holders[_place(c)]) == 1) for held in everyone]
    writer: dict[tuple[str, tuple[int, ...]], int] = {}
    for chunk in chain.from_iterable(everyone):
        able = holders[_place(chunk)]
        if len(able) > 1 and _place(chunk) not in writer:
            best = min(able, key=lambda rank: (load[rank], rank))
            load[best] += chunk.nbytes
            writer[_place(chunk)] = best
    return [
        [chunk for chunk in held if writer.get(_place(chunk), rank) == rank]
        for rank, held in enumerate(everyone)
    ]


def _place(chunk: Chunk) -> tuple[str, tuple[int, ...]]:
    return chunk.name, tuple(part.start for part in chunk.box)


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, *, doing: str) -> None:
    """Write the files of all ranks' tensors; collective. `doing`: as on_every_rank's."""
    mine = share_out(gather_chunks(held_chunks(tensors)))[dist.get_rank()]

    def values() -> Iterator[tuple[Chunk, Tensor]]:
        return ((chunk, local_part(tensors[chunk.name]).detach()) for chunk in mine)

    write_chunks(folder, values, doing=doing)


def own_files(folder: Path) -> list[str]:
    """The names of those that this rank wrote."""
    return [path.name for path in folder.glob(f"__{dist.get_rank()}_*.distcp")]


def write_chunks(
    folder: Path, chunks: Callable[[], Iterator[tuple[Chunk, Tensor]]], *, doing: str
) -> None:
    """Write the files of all ranks' chunks, each made only when it is written; collective.

    Args:
        chunks: this rank's, each with its values.
        doing: as on_every_rank's.
    """
    written = on_every_rank(lambda: _write_files(folder, chunks()), doing=doing)
    everyone = gather_chunks(written)
    on_rank_zero(lambda: write_file(folder / METADATA, [metadata_of(everyone)]), doing=doing)


def _write_files(folder: Path, chunks: Iterator[tuple[Chunk, Tensor]]) -> list[Chunk]:
    """Write one rank's files; returns its chunks."""
    written: list[Chunk] = []
    layout = FileLayout(dist.get_rank())
    placed = ((layout.place(chunk).relative_path, chunk, values) for chunk, values in chunks)

    def contents(of_file: Iterator[tuple[str, Chunk, Tensor]]) -> Iterator[Bytes]:
        for _, chunk, values in of_file:
            written.append(chunk)
            frame = frame_of(chunk)
            yield from (frame.before, _raw(values), frame.after)

    for name, of_file in groupby(placed, key=lambda each: each[0]):
        write_file(folder / name, contents(of_file))
    return written


def _raw(values: Tensor) -> Bytes:
    """The bytes of a tensor, in the order of its elements."""
    flat = values.cpu().contiguous().reshape(-1)
    return as_array(flat.view(torch.uint8)).data if len(flat) else b""


class FileLayout:
    """Where a rank's chunks go: files of about `_LARGEST_FILE` bytes."""

    def __init__(self, rank: int) -> None:
        self._rank, self._number, self._offset = rank, 0, 0

    def place(self, chunk: Chunk) -> _StorageInfo:
        """That of the next chunk."""
        if self._offset > _LARGEST_FILE:
            self._number, self._offset = self._number + 1, 0
        frame = frame_of(chunk)
        length = len(frame.before) + chunk.nbytes + len(frame.after)
        info = _StorageInfo(f"__{self._rank}_{self._number}.distcp", self._offset, length)
        self._offset += length
        return info


def metadata_of(everyone: Iterable[Iterable[Chunk]]) -> bytes:
    """`.metadata` of the files with the chunks that each rank has written."""
    metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta())
    for rank, chunks in enumerate(everyone):
        layout = FileLayout(rank)
        for chunk in chunks:
            shape, properties = torch.Size(chunk.shape), TensorProperties(dtype=chunk.dtype)
            entry = metadata.state_dict_metadata.setdefault(
                chunk.name, TensorStorageMetadata(properties, shape, [])
            )
            assert isinstance(entry, TensorStorageMetadata)
            offsets = torch.Size(part.start for part in chunk.box)
            entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(sizes(chunk.box))))
            metadata.storage_data[MetadataIndex(chunk.name, offsets)] = layout.place(chunk)
    return pickle.dumps(metadata)


def frame_of(chunk: Chunk) -> Frame:
    """What is written around a chunk's values."""
    return _frame(sizes(chunk.box), chunk.dtype)


@cache
def _frame(shape: tuple[int, ...], dtype: torch.dtype) -> Frame:
    """From torch.save of a tensor whose memory is never touched."""
    nbytes = prod(shape) * dtype.itemsize
    # Not torch.empty: debug.deterministic would fill it.
    tensor = (
        torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(shape)
        if nbytes
        else torch.empty(shape, dtype=dtype)
    )
    stream = _AroundValues(tensor)
    # The archive's own CRC, at the price of another pass, would say less than the checksums do.
    with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        torch.save(tensor, cast(IO[bytes], stream))
    assert stream.skipped == nbytes, "torch.save writes a tensor's values from elsewhere"
    return Frame(bytes(stream.before), bytes(stream.after))


class _AroundValues:
    """A stream that keeps what does not come from a tensor's memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._memory = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        self.before, self.after, self.skipped = bytearray(), bytearray(), 0

    def write(self, data: memoryview) -> int:
        address = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
        if address in self._memory:
            self.skipped += data.nbytes
        else:
            (self.after if self.skipped else self.before).extend(data)
        return data.nbytes

    def flush(self) -> None:
        """torch.save asks for it."""
