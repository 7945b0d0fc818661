"""A checkpoint's tensor files: written by DCP from tensors in memory, or chunk by chunk."""

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config

from titan_moe.checkpoint.safe_reader import METADATA
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


def write_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write DCP's files of all ranks' tensors; collective."""
    save_tensors(
        tensors,
        storage_writer=_Writer(folder, sync_files=True, thread_count=1),
        planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )


def own_files(folder: Path) -> list[str]:
    """The names of those that this rank wrote."""
    return [path.name for path in folder.glob(f"__{dist.get_rank()}_*.distcp")]


class _SavePlanner(DefaultSavePlanner):
    """Says itself where each part lies: torch's planner reads no explicit `shard_order`."""

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                _written(name, tensor, chunk)
                for name, tensor in self.state_dict.items()
                for chunk in _held(tensor)
            ]
        )
        return self.plan


def _written(name: str, tensor: Tensor, chunk: ChunkStorageMetadata) -> WriteItem:
    properties = TensorProperties.create_from_tensor(local_part(tensor))
    return WriteItem(
        MetadataIndex(name, chunk.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, properties, tensor.size()),
    )


def _held(tensor: Tensor) -> list[ChunkStorageMetadata]:
    """This rank's part, as DCP describes it; nothing for a part that is empty: DCP tells chunks
    apart by where they begin."""
    box = local_slices(tensor)
    if 0 in sizes(box) and tensor.numel():
        return []
    return [_as_stored(box)]


def _as_stored(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.start for part in box), torch.Size(sizes(box)))


class _Writer(FileSystemWriter):
    """A FileSystemWriter whose failures are the disk's own words."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save covers "no space left" with a complaint about its own archive.
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            raise first from None


def write_chunks(
    folder: Path, chunks: Callable[[], Iterator[tuple[Chunk, Tensor]]], *, doing: str
) -> None:
    """Write DCP's files of all ranks' chunks, each made only when it is written; collective.

    DCP's own writer keeps every tensor that it has written until the end of the file.

    Args:
        chunks: this rank's, each with its values.
        doing: as on_every_rank's.
    """
    places = on_every_rank(lambda: _write_files(folder, chunks()), doing=doing)
    everyone: list[list[tuple[Chunk, _StorageInfo]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, places)
    on_rank_zero(lambda: _write_metadata(folder, chain.from_iterable(everyone)), doing=doing)


def _write_files(
    folder: Path, chunks: Iterator[tuple[Chunk, Tensor]]
) -> list[tuple[Chunk, _StorageInfo]]:
    """Files of about `_LARGEST_FILE` bytes; returns where each chunk is."""
    places: list[tuple[Chunk, _StorageInfo]] = []
    number, following = 0, next(chunks, None)
    # The archive's own CRC, at the price of another pass, would say less than the checksums do.
    with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        while following is not None:
            file = f"__{dist.get_rank()}_{number}.distcp"
            with (folder / file).open("wb") as stream:
                while following is not None and stream.tell() <= _LARGEST_FILE:
                    chunk, values = following
                    offset = stream.tell()
                    torch.save(values, stream)
                    places.append((chunk, _StorageInfo(file, offset, stream.tell() - offset)))
                    del following, values
                    following = next(chunks, None)
                stream.flush()
                os.fsync(stream.fileno())
            number += 1
    return places


def _write_metadata(folder: Path, places: Iterable[tuple[Chunk, _StorageInfo]]) -> None:
    metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta())
    for chunk, place in places:
        shape, properties = torch.Size(chunk.shape), TensorProperties(dtype=chunk.dtype)
        entry = metadata.state_dict_metadata.setdefault(
            chunk.name, TensorStorageMetadata(properties, shape, [])
        )
        assert isinstance(entry, TensorStorageMetadata)
        stored = _as_stored(chunk.box)
        entry.chunks.append(stored)
        metadata.storage_data[MetadataIndex(chunk.name, stored.offsets)] = place
    with (folder / METADATA).open("wb") as file:
        pickle.dump(metadata, file)
