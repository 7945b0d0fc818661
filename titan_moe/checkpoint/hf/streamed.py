"""A checkpoint written chunk by chunk, each made only when it is written.

DCP's own writer keeps every tensor that it has written until the end of the file.
"""

import os
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
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

from titan_moe.checkpoint.hf.ahead import one_ahead
from titan_moe.checkpoint.hf.pieces import Box, lengths

_LARGEST_FILE = 5 * 10**9


class Chunk(NamedTuple):
    """A box of a tensor of the checkpoint."""

    name: str
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype


def write_streamed(folder: Path, chunks: Iterable[Chunk], make: Callable[[Chunk], Tensor]) -> None:
    """Write DCP's files of this rank's chunks; collective.

    Args:
        make: gives a chunk's values; called in the chunks' order, one chunk ahead of the writing,
            in another thread.
    """
    # The archive's own CRC, at the price of another pass, would say less than the checksums do.
    with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        save_tensors(
            {},
            storage_writer=_Writer(folder, sync_files=True),
            planner=_Planner(list(chunks), make),
        )


class _Planner(SavePlanner):
    def __init__(self, chunks: list[Chunk], make: Callable[[Chunk], Tensor]) -> None:
        self._chunks, self._make = chunks, make
        self._of_index = {_index(chunk): chunk for chunk in chunks}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(chunk) for chunk in self._chunks])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._make(self._of_index[write_item.index])


def _index(chunk: Chunk) -> MetadataIndex:
    return MetadataIndex(chunk.name, torch.Size(part.start for part in chunk.box))


def _write_item(chunk: Chunk) -> WriteItem:
    index, shape = _index(chunk), torch.Size(chunk.shape)
    assert index.offset is not None
    stored = ChunkStorageMetadata(index.offset, torch.Size(lengths(chunk.box)))
    data = TensorWriteData(stored, TensorProperties(dtype=chunk.dtype), shape)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class _Writer(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        values = one_ahead(lambda item: (item, planner.resolve_data(item)), plan.items)
        number, first = 0, next(values, None)
        while first is not None:
            file = f"{plan.storage_data.prefix}{number}.distcp"
            with (Path(self.path) / file).open("wb") as stream:
                for item, tensor in chain([first], values):
                    offset = stream.tell()
                    torch.save(tensor, stream)
                    length = stream.tell() - offset
                    place = _StorageInfo(file, offset, length)
                    results.append(WriteResult(item.index, length, place))
                    del tensor
                    if stream.tell() > _LARGEST_FILE:
                        break
                stream.flush()
                os.fsync(stream.fileno())
            number, first = number + 1, next(values, None)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future
