"""Reading DCP's files without trusting them.

DCP's `.metadata` is a pickle, and a pickle may call anything. Here it may only build the handful of
record types that a checkpoint of tensors consists of. The tensor files are read by torch with
`weights_only=True`; DCP's entries of other kinds would not be, so a checkpoint that has any is
refused.
"""

import importlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from titan_moe.checkpoint.digests import read_checked
from titan_moe.checkpoint.storage import METADATA
from titan_moe.runtime.errors import RunError

_ALLOWED = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _AllowListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            if module == "pathlib._local":  # Written by Python 3.13, whose pathlib is a package.
                module = "pathlib"
            return getattr(importlib.import_module(module), name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def _memory_format(kind: type, name: str) -> _MEM_FORMAT_ENCODING:
    """What Python 3.11.0 to 3.11.3, that of Debian 12 among them, writes `getattr(kind, name)` for:
    the member of an enumeration. No other one is in a checkpoint."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks for getattr of {kind!r}, which no checkpoint needs")
    return _MEM_FORMAT_ENCODING[name]


class SafeReader(FileSystemReader):
    """A FileSystemReader that has read its metadata through the allow-list and checked the files.

    Raises RunError when the metadata is missing, damaged or asks for anything outside the
    allow-list, and when a tensor file is missing or too short.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = _read_metadata(folder)
        _check_files(folder, self._metadata)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def chunks(self, prefix: str) -> list[tuple[str, tuple[slice, ...]]]:
        """The boxes that tensors of such names are stored in, in the order of the files."""
        found = []
        for fqn, entry in self._metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks if fqn.startswith(prefix) else []:
                info = self._metadata.storage_data[MetadataIndex(fqn, chunk.offsets)]
                place = zip(chunk.offsets, chunk.sizes, strict=True)
                box = tuple(slice(at, at + size) for at, size in place)
                found.append((info.relative_path, info.offset, fqn, box))
        return [(fqn, box) for _, _, fqn, box in sorted(found, key=lambda one: one[:2])]

    def read_chunk(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """One of those boxes. Raises RunError when its file is damaged."""
        info = self._metadata.storage_data[MetadataIndex(name, [part.start for part in box])]
        try:
            with (Path(self.path) / info.relative_path).open("rb") as file:
                view = self._slice_file(file, info)
                values = torch.load(view, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception:  # Unpickling garbage raises nearly anything.
            values = None
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        wanted = tuple(part.stop - part.start for part in box), entry.properties.dtype
        if not isinstance(values, Tensor) or (tuple(values.shape), values.dtype) != wanted:
            raise RunError(
                f"checkpoint {self.path}: {info.relative_path} is damaged or not to be trusted"
            )
        return values


def _read_metadata(folder: Path) -> Metadata:
    path = folder / METADATA
    try:
        metadata = _checked(_AllowListUnpickler(io.BytesIO(read_checked(path))).load())
    except FileNotFoundError:
        raise RunError(f"checkpoint {folder} is incomplete: {METADATA} is missing") from None
    except RunError:
        raise
    except Exception as error:  # Unpickling garbage raises nearly anything.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RunError(f"{path} is damaged or not to be trusted: {reason}") from None
    # DCP asks for the field; where the checkpoint once lay is of no use to us.
    metadata.storage_meta = StorageMeta()
    return metadata


def _checked(metadata: object) -> Metadata:
    if not isinstance(metadata, Metadata):
        raise TypeError("it holds no DCP metadata")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name} is no tensor")
    for index, info in metadata.storage_data.items():
        # Neither a path out of the folder nor a stream transform (they are plug-ins) is ever ours.
        if Path(info.relative_path).name != info.relative_path or info.transform_descriptors:
            raise ValueError(f"{index.fqn} is stored in an unknown way")
    return metadata


def _check_files(folder: Path, metadata: Metadata) -> None:
    """Every file is as long as its last entry says: torch's own error would not name the file."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = folder / name
        if not path.is_file():
            raise RunError(f"checkpoint {folder} is incomplete: {name} is missing")
        if (size := path.stat().st_size) < end:
            raise RunError(f"{path} is truncated: {size} bytes instead of {end}")
