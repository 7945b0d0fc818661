"""Tokenised corpora of Megatron-LM: pairs of files, NAME.bin and NAME.idx.

`.bin` holds the token ids of sequences, one after the other. `.idx` holds, all little-endian: nine
bytes that name the format, its version (uint64), the code of the ids' type (uint8), the number S of
sequences and D of bounds of documents (uint64); then each sequence's length (int32) and first byte
in `.bin` (int64), then the first sequence of each document and the end of the last one (int64).
Sets for images append a byte for each sequence. Format: megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from titan_moe.config.errors import ConfigError
from titan_moe.data.corpus import Source, sampled_checksum
from titan_moe.data.order import Document, digest
from titan_moe.data.tokens import read_numbers
from titan_moe.runtime.errors import RunError

_HEADER = struct.Struct("<9sQBQQ")
_NAME, _VERSION = b"MMIDIDX\0\0", 1
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_WANTED = "a folder, or NAME of NAME.bin and .idx"
# Files open at once: a set may have more pairs than a process may have files.
_MOST_OPEN = 256


class _Pair(NamedTuple):
    idx: Path
    bin: Path
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int


class MegatronCorpus:
    """The documents of one pair, or of all pairs below a folder in the order of their names.

    A document is what the index calls one: several sequences if sentences were split. Nothing but
    headers is read before it is asked for.
    """

    def __init__(self, source: Source) -> None:
        """ConfigError if a file is missing, of another format, or cut short."""
        self._pairs = []
        for index in _find_indexes(source):
            try:
                self._pairs.append(_open_pair(index))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{source.path_name}: {index}: {error}") from None
        self._ends = list(accumulate(pair.num_documents for pair in self._pairs))
        if len(self) == 0:
            raise ConfigError(f"{source.path_name} holds no document")
        self._open = lru_cache(_MOST_OPEN)(_open)
        listing = repr([(pair.idx.name, *map(str, pair[2:])) for pair in self._pairs])
        self.fingerprint = f"megatron:{digest(listing)}"

    def checksum(self) -> str:
        return sampled_checksum([path for pair in self._pairs for path in (pair.idx, pair.bin)])

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Document:
        which = bisect_right(self._ends, index)
        pair = self._pairs[which]
        number = index - self._ends[which] + pair.num_documents
        file = self._open(pair.idx)
        bounds = _HEADER.size + 12 * pair.num_sequences
        begin, end = read_numbers(file, "<i8", number, number + 2, offset=bounds).tolist()
        if not 0 <= begin <= end <= pair.num_sequences:
            raise _damaged(pair.idx, number)
        found = [np.empty(0, pair.dtype)]
        for length, pointer in _sequences(file, pair.num_sequences, begin, end):
            if length < 0 or pointer < 0:
                raise _damaged(pair.idx, number)
            found.append(read_numbers(self._open(pair.bin), pair.dtype, 0, length, offset=pointer))
        return Document(f"{pair.idx.stem}/{number}", np.concatenate(found))


def _open(path: Path) -> BinaryIO:
    return path.open("rb", buffering=0)


def _sequences(index: BinaryIO, count: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Length and first byte of sequences [begin, end) of `count`."""
    lengths = read_numbers(index, "<i4", begin, end, offset=_HEADER.size)
    pointers = read_numbers(index, "<i8", begin, end, offset=_HEADER.size + 4 * count)
    return zip(lengths.tolist(), pointers.tolist(), strict=True)


def _damaged(index: Path, number: int) -> RunError:
    return RunError(f"{index} is damaged, document {number} is not in the files: copy them again")


def _find_indexes(source: Source) -> list[Path]:
    """The .idx file of each pair that a source's path names: a folder, or a pair with or without an
    ending. Those of a folder include missing ones, whose .bin is there."""
    path = source.required_path(_WANTED)
    if not path.is_dir():
        name = path.name.removesuffix(".idx").removesuffix(".bin")
        return [path.with_name(f"{name}.idx")]
    names = (name for ending in (".idx", ".bin") for name in path.rglob(f"[!.]*{ending}"))
    if found := sorted({name.with_suffix(".idx") for name in names}):
        return found
    raise ConfigError(f"{source.path_name} holds no pair of NAME.bin and NAME.idx")


def _open_pair(index: Path) -> _Pair:
    """ValueError or OSError says what is wrong with a pair."""
    ids = index.with_suffix(".bin")
    for path in (index, ids):
        if not path.is_file():
            raise ValueError(f"{path.name} does not exist: name {_WANTED}")
    size, size_of_ids = index.stat().st_size, ids.stat().st_size
    with _open(index) as file:
        header = file.read(_HEADER.size).ljust(_HEADER.size, b"\0")
        name, version, code, sequences, bounds = _HEADER.unpack(header)
        if name != _NAME or version != _VERSION:
            raise ValueError(
                f"not an index of Megatron's format, version 1 (begins with {header[:17]!r})"
            )
        dtype = np.dtype(_TYPES.get(code, "V"))
        if dtype.kind not in "ui":
            kind = dtype.name if code in _TYPES else f"unknown type {code}"
            raise ValueError(f"holds numbers of {kind}, which are no token ids")
        wanted = _HEADER.size + 12 * sequences + 8 * bounds
        if size not in (wanted, wanted + sequences):
            raise ValueError(f"has {size:,} bytes, not the {wanted:,} of its header: copy it again")
        end = 0
        for length, pointer in _sequences(file, sequences, max(0, sequences - 1), sequences):
            end = pointer + length * dtype.itemsize
    if size_of_ids != end:
        raise ValueError(
            f"{ids.name} has {size_of_ids:,} bytes, not the {end:,} of the index: copy both again"
        )
    return _Pair(index, ids, dtype, sequences, max(0, bounds - 1))
