"""The safetensors format: 8 bytes that give a length, as much JSON, then row-major tensors.

Read here and not by the `safetensors` package, which maps files into memory: where a mapped file
ends early or cannot be read, the process dies of SIGBUS; here a RunError names the file. Written
here because each rank writes its boxes into their places: the package, and torch's
HuggingFaceStorageWriter, which uses it, want whole tensors, or a second pass over shards.
Format: https://github.com/huggingface/safetensors, "Format".
"""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_moe.checkpoint.hf.pieces import Box, lengths, runs
from titan_moe.runtime.errors import RunError, reason
from titan_moe.runtime.files import parse_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_ALIGNMENT = 8
_LONGEST_HEADER = 100_000_000  # The reference implementation's own limit.
# Bytes from which a run is read by itself. Shorter ones are read with what lies between them: a
# call costs about as much as copying this many.
_LONG_RUN = 2**14


class Entry(NamedTuple):
    """Where a tensor is."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Bytes from the file's start."""


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file. Raises RunError when it is missing, damaged or too short."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise RunError(f"{path} is truncated, or no safetensors file")
            header = parse_json(file.read(length))
            found = {
                name: _entry(path, 8 + length, record)
                for name, record in header.items()
                if name != "__metadata__"
            }
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is damaged, or no safetensors file ({reason(error)})") from None
    end = max((e.start + prod(e.shape) * e.dtype.itemsize for e in found.values()), default=0)
    if size < end:
        raise RunError(f"{path} is truncated: {size} bytes instead of {end}")
    return found


def _entry(path: Path, data: int, record: dict) -> Entry:
    if record["dtype"] not in DTYPES:
        raise ValueError(f"unknown type {record['dtype']}")
    dtype, shape = DTYPES[record["dtype"]], tuple(map(int, record["shape"]))
    start, stop = record["data_offsets"]
    if min(shape, default=0) < 0 or start < 0 or stop - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"offsets {start} to {stop} are not those of {shape}")
    return Entry(path, dtype, shape, data + start)


def make_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[bytes, dict[str, int], int]:
    """The bytes before the data, each tensor's place in the file, and the file's size."""
    records: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        length = prod(shape) * dtype.itemsize
        records[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + length],
        }
        places[name] = at
        at += length
    text = json.dumps(records, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    data = 8 + len(text)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: data + place for name, place in places.items()}, data + at


def read_box(descriptor: int, entry: Entry, box: Box) -> Tensor:
    """A box of a tensor, which may have steps; reads little more than its bytes.

    Raises RunError when the file ends too early.
    """
    sizes = lengths(box)
    if not prod(sizes):
        return torch.empty(sizes, dtype=entry.dtype)
    item = entry.dtype.itemsize
    own = list(runs(entry.shape, box)) if _runs_are_long(entry, box) else []
    if own:
        buffer = torch.empty(prod(sizes) * item, dtype=torch.uint8)
        view = buffer.numpy().data
        for run in own:
            part = view[run.box_offset * item : (run.box_offset + run.length) * item]
            _read_into(descriptor, entry.path, part, entry.start + run.offset * item)
        return buffer.view(entry.dtype).view(sizes)
    # All of the trailing dims, for the box's rows.
    rows = next((d for d, size in enumerate(sizes) if size > 1), len(sizes) - 1)
    wide = tuple(
        slice(part.start, part.stop) if dim <= rows else slice(0, size)
        for dim, (part, size) in enumerate(zip(box, entry.shape, strict=True))
    )
    (run,) = runs(entry.shape, wide)
    buffer = torch.empty(run.length * item, dtype=torch.uint8)
    _read_into(descriptor, entry.path, buffer.numpy().data, entry.start + run.offset * item)
    inner = tuple(
        slice(part.start - first.start, part.stop - first.start, part.step)
        for part, first in zip(box, wide, strict=True)
    )
    return buffer.view(entry.dtype).view(lengths(wide))[inner]


def _runs_are_long(entry: Entry, box: Box) -> bool:
    first = next(runs(entry.shape, box))
    return first.length * entry.dtype.itemsize >= _LONG_RUN or first.length == prod(lengths(box))


def _read_into(descriptor: int, path: Path, view: memoryview, at: int) -> None:
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], at + done)
        if got == 0:
            raise RunError(f"{path} is truncated: it ends at byte {at + done}")
        done += got


def write_all(descriptor: int, data: memoryview, at: int) -> None:
    """Write bytes at a place of a file."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return np.from_dlpack(tensor.reshape(-1).view(torch.uint8)).data
