"""A checkpoint's tensors: their names, the boxes that ranks hold, and torch.distributed.checkpoint.

Names are `model.<fqn>` and `optimizer.<fqn>.<key>`. DCP plans, writes and reads; the classes here
tell it which box of a tensor a rank holds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer
from torch.utils.serialization import config

from titan_moe.distributed.agreement import control_group, for_all_ranks, on_every_rank
from titan_moe.distributed.boxes import Box, sizes
from titan_moe.distributed.dtensor import detached, local_part, local_slices
from titan_moe.runtime.errors import RunError, is_outside, reason
from titan_moe.runtime.files import fsync

MODEL = "model."
OPTIMIZER = "optimizer."
METADATA = ".metadata"
_FILE_BYTES = 10**9


class Chunk(NamedTuple):
    """A box of a tensor of the checkpoint."""

    name: str
    box: Box
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype

    @property
    def key(self) -> MetadataIndex:
        return MetadataIndex(self.name, [each.start for each in self.box])

    @property
    def place(self) -> ChunkStorageMetadata:
        offsets = torch.Size([each.start for each in self.box])
        return ChunkStorageMetadata(offsets, torch.Size(sizes(self.box)))


def model_tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers, detached, sharing memory with the modules.

    Several modules are stages of one pipeline and name no tensor twice.
    """
    return {MODEL + fqn: detached(tensor) for fqn, tensor in _named_tensors(modules).items()}


def optimizer_tensors(modules: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns the optimizer's state, sharing memory with it, named after the model's parameters.

    The optimizer has all of its state before its first step, so the names do not depend on the
    run's history and a fresh one can be loaded into. Parameter groups are left out: they follow
    from the configuration and the step.

    Raises:
        TypeError: a parameter has no state.
    """
    fqns: dict[Tensor, str] = {}
    for fqn, tensor in _named_tensors(modules).items():
        fqns.setdefault(tensor, fqn)  # A tied parameter goes by its first name.
    result = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                raise TypeError(f"{type(optimizer).__name__} has no state of {fqns[parameter]}")
            for key, value in optimizer.state[parameter].items():
                result[f"{OPTIMIZER}{fqns[parameter]}.{key}"] = value
    return result


def _named_tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    # state_dict() rather than named_parameters(): FSDP2 hooks it to put back sharded parameters,
    # which a forward without a backward (validation) may have left gathered.
    return {
        fqn: value
        for module in modules
        for fqn, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }


def local_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the local parts, sharing memory: what DCP copies, writes and fills."""
    return {name: local_part(tensor).detach() for name, tensor in tensors.items()}


def held_chunks(tensors: Mapping[str, Tensor]) -> list[Chunk]:
    """Returns the boxes that this rank holds. An empty part has none: DCP tells chunks of a tensor
    apart by where they begin."""
    return [
        Chunk(name, box, tuple(tensor.shape), tensor.dtype)
        for name, tensor in tensors.items()
        if 0 not in sizes(box := local_slices(tensor)) or not tensor.numel()
    ]


class SavePlanner(DefaultSavePlanner):
    """Plans the write of one rank's chunks. DCP writes a chunk that several ranks hold once.

    Args:
        chunks: this rank's.
        make: makes the values of a chunk when it is written; None: they are the state dict's.
    """

    def __init__(
        self, chunks: Sequence[Chunk], make: Callable[[Chunk], Tensor] | None = None
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {chunk.key: chunk for chunk in chunks}
        self._make = make

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, chunk in self._chunks.items():
            properties, shape = TensorProperties(dtype=chunk.dtype), torch.Size(chunk.shape)
            data = TensorWriteData(chunk.place, properties, shape)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        if self._make is not None:
            return self._make(self._chunks[index])
        return self.state_dict[index.fqn]


class FolderWriter(FileSystemWriter):
    """Writes the tensor files of a folder.

    Args:
        finish: runs on rank 0 once all files of all ranks are on disk, before any rank's save ends;
            takes their names.
        copy_ahead: bytes copied from a GPU ahead of the write.
    """

    def __init__(
        self, folder: Path, finish: Callable[[set[str]], None], *, copy_ahead: int = 10_000_000
    ) -> None:
        # DCP would wait for the disk before it flushes the last bytes of a file.
        super().__init__(folder, per_thread_copy_ahead=copy_ahead, sync_files=False)
        self._folder, self._finish = folder, finish

    def write_data(self, plan: SavePlan, planner: Any) -> Future[Any]:
        # The archive's own CRC, at the price of another pass, would say less than the checksums.
        results: list[WriteResult] = []
        try:
            with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                for part in _parts(plan):
                    results += super().write_data(part, planner).value()
        except RuntimeError as error:
            # torch.save ends its archive after a failed write too, and so hides the first error.
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        for name in _names(results):
            fsync(self._folder / name)
        written: Future[Any] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        super().finish(metadata, results)
        self._finish(_names(chain.from_iterable(results)))

    def storage_meta(self) -> StorageMeta:
        """Returns nothing of the temporary folder: it has another name later."""
        return StorageMeta()


class Stager(AsyncStager):
    """Copies tensors to the host, into memory that is kept from one save to the next.

    DCP's DefaultStager frees that memory after each save in torch 2.11, and then cannot copy again.

    Args:
        pinned: page-lock the memory, so that a GPU copies at its full rate.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._copies: dict[str, Tensor] = {}

    def stage(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the copies when they are complete; the next call overwrites them."""
        kept, self._copies = self._copies, {}
        for name, tensor in state_dict.items():
            copy = kept.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned)
            self._copies[name] = copy.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._copies

    def synchronize_staging(self) -> None:
        """Does nothing: copies are complete when `stage` returns."""

    def close(self) -> None:
        """Does nothing: DCP closes the stagers that it makes itself."""


def _parts(plan: SavePlan) -> Iterator[SavePlan]:
    """Splits a plan into files of about `_FILE_BYTES`: DCP keeps all tensors of a file in memory
    until it is closed."""
    files: list[list[WriteItem]] = [[]]
    size = 0
    for item in plan.items:
        if size > _FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(item)
        size += item.tensor_storage_size() or 0
    for number, items in enumerate(files):
        place = plan.storage_data
        if number:
            place = replace(place, prefix=f"{place.prefix}{number}_")
        yield replace(plan, items=items, storage_data=place)


def _box(offsets: torch.Size, item: ReadItem) -> Box:
    return tuple(slice(at, at + size) for at, size in zip(offsets, item.lengths, strict=True))


def _names(results: Iterable[WriteResult]) -> set[str]:
    """Returns the names of the files that were written."""
    return {each.storage_data.relative_path for each in results}


@contextmanager
def one_line(doing: str) -> Iterator[None]:
    """Raises one line of the lowest failing rank instead of DCP's traceback of every rank.

    Args:
        doing: as on_every_rank's.
    """
    try:
        yield
    except CheckpointException as error:
        cause = error.failures[min(error.failures)][0]
        raise for_all_ranks(cause, doing) from cause


def write_chunks(
    folder: Path, chunks: Sequence[Chunk], make: Callable[[Chunk], Tensor], *, doing: str
) -> None:
    """Write the files of all ranks' chunks, each made only when it is written, in their order;
    collective."""
    writer = FolderWriter(folder, lambda names: None, copy_ahead=0)
    planner = SavePlanner(chunks, make)
    with one_line(doing):
        dcp.save({}, storage_writer=writer, planner=planner, process_group=control_group())


def read_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Read into tensors of any layout, in place; collective.

    Raises RunError on all ranks when a file cannot be read or is damaged.
    """
    parts, doing = local_tensors(tensors), f"cannot load checkpoint {folder}"
    on_every_rank(lambda: StoredTensors(folder).fill(held_chunks(tensors), parts), doing=doing)


class StoredTensors:
    """A checkpoint's tensors, read box by box. `read_manifest` has compared the digest of
    .metadata, a pickle.

    Raises RunError when the files cannot be read or are damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader = folder, FileSystemReader(folder)
        self._last: tuple[MetadataIndex, Tensor] | None = None
        with self._one_error(METADATA):
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def chunks(self) -> list[Chunk]:
        """Returns the stored boxes of all tensors."""
        chunks = []
        for name, entry in self._metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            for stored in entry.chunks:
                ends = zip(stored.offsets, stored.sizes, strict=True)
                box = tuple(slice(at, at + size) for at, size in ends)
                chunks.append(Chunk(name, box, tuple(entry.size), entry.properties.dtype))
        return chunks

    def read(self, chunk: Chunk) -> Tensor:
        """Returns the values of any box. Keeps the stored box that it last read, for its parts."""
        items = self._items(chunk)
        if len(items) == 1:
            return self._kept(items[0].storage_index)[_box(items[0].storage_offsets, items[0])]
        values = torch.empty(sizes(chunk.box), dtype=chunk.dtype)
        self.fill([chunk], {chunk.name: values})
        return values

    def fill(self, chunks: Sequence[Chunk], values: Mapping[str, Tensor]) -> None:
        """Read boxes, at most one of each tensor, into the values by name."""
        for chunk in chunks:
            for item in self._items(chunk):
                part = self._kept(item.storage_index)[_box(item.storage_offsets, item)]
                with self._one_error(self._reader.storage_data[item.storage_index].relative_path):
                    values[chunk.name].detach()[_box(item.dest_offsets, item)].copy_(part)

    def _items(self, chunk: Chunk) -> list[ReadItem]:
        stored = self._metadata.state_dict_metadata.get(chunk.name)
        if not isinstance(stored, TensorStorageMetadata):
            raise RunError(f"{METADATA} does not describe {chunk.name}")
        return create_read_items_for_chunk_list(chunk.name, stored, [chunk.place])

    def _kept(self, index: MetadataIndex) -> Tensor:
        if self._last is None or self._last[0] != index:
            self._last = None  # Frees it before the next one is read.
            place = self._reader.storage_data[index]
            path = self._folder / place.relative_path
            with self._one_error(path.name), path.open("rb") as file:
                part = self._reader._slice_file(file, place)
                self._last = index, torch.load(part, map_location="cpu", weights_only=True)
        return self._last[1]

    @contextmanager
    def _one_error(self, file: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise RunError(f"checkpoint {self._folder} is incomplete: {file} is missing") from None
        except Exception as error:  # Unpickling garbage raises nearly anything.
            if is_outside(error):
                raise
            why = reason(error).partition(". ")[0]  # torch's advice follows, to trust the pickle.
            raise RunError(f"checkpoint {self._folder} is damaged: {file}: {why}") from error
