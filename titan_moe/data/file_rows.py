"""JSON lines that need not be in order, records that are too long, and where a document of a set of
files stands."""

from __future__ import annotations

import gzip
import io
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import IO, cast

from titan_moe.data.bad_documents import text_problem
from titan_moe.runtime.files import parse_json

# Counting the rows of so much JSON takes a second, and is done for the first bad document only.
_MOST_COUNTED = 1 << 30

NOT_UTF8 = "is not UTF-8"

LONGEST_RECORD = 64 << 20
"""Bytes of one document of a compressed file, which may be a thousand times as long as the file. A
plain file is as long as it is."""
_BLOCK = 1 << 20
_SEPARATORS = {"json": b"\n", "text": b"\n\n"}
_REMEDIES = {
    "json": "write each record on a line of its own, or unpack a file that is one JSON array",
    "text": "separate documents by blank lines",
}


def overlong_record(dataset: str, files: Sequence[Path]) -> str:
    """The first record of compressed json or text files that is too long to be read, in words;
    empty where there is none. Decompresses everything, a block at a time.

    Nothing is said of a file that cannot be read: reading it as data will say why.
    """
    for path in files:
        if dataset in _SEPARATORS and path.suffix in (".gz", ".zst"):
            with suppress(Exception), opened(path) as file:  # Each format raises its own.
                if line := _overlong(file, dataset):
                    return (
                        f"the {'record' if dataset == 'json' else 'paragraph'} that begins in line "
                        f"{line:,} of {path} is longer than {LONGEST_RECORD >> 20} MiB, the most "
                        f"that one of a compressed file may be: {_REMEDIES[dataset]}"
                    )
    return ""


def _overlong(file: IO[bytes], dataset: str) -> int:
    """The line that a record of more than LONGEST_RECORD bytes begins in; 0 if there is none."""
    separator, start = _SEPARATORS[dataset], file.read(_BLOCK)
    if dataset == "json" and not _begins_with_record(start):
        separator = b""  # One array, or something that is read whole to see what it is.
    line, begun_in, length, rest = 1, 1, 0, b""
    while block := start or file.read(_BLOCK):
        start = b""
        block = rest + block.replace(b"\r", b"")
        # A separator may lie across two blocks.
        rest = block[len(block) - max(len(separator) - 1, 0) :]
        first = block.find(separator) if separator else -1
        if length + (first if first >= 0 else len(block) - len(rest)) > LONGEST_RECORD:
            return begun_in
        if first >= 0:
            last = block.rfind(separator) + len(separator)
            begun_in, length = line + block.count(b"\n", 0, last), -last
        length += len(block) - len(rest)
        line += block.count(b"\n") - rest.count(b"\n")
    return begun_in if length + len(rest) > LONGEST_RECORD else 0


def _begins_with_record(start: bytes) -> bool:
    """Whether JSON lines may begin so: with a whole record, or with one longer than a block."""
    line, end, _ = start.lstrip().partition(b"\n")
    if not end:
        return line.startswith(b"{")
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def text_of_line(line: bytes, column: str) -> tuple[str | None, str]:
    """The text of a JSON record, or why it has none. ValueError where the line is no record."""
    try:
        record = parse_json(line)
    except UnicodeDecodeError:
        return None, NOT_UTF8
    if not isinstance(record, dict):
        raise ValueError("no JSON object")
    text = record.get(column)
    problem = text_problem(text)
    if not problem:
        try:
            str(text).encode()
        except UnicodeEncodeError:
            problem = "holds half of a surrogate pair"
    return (None, problem) if problem else (text, "")


class Places:
    """File and row of each document, in words; rows are counted from 1."""

    def __init__(self, dataset: str, files: Sequence[Path]) -> None:
        """dataset: json, parquet or text."""
        self._dataset = dataset
        self._files = files

    def __getitem__(self, index: int) -> str:
        if len(self._files) == 1:
            return f"{self._files[0]}, row {index + 1:,}"
        rows_left = index
        for path, count in zip(self._files, self._rows, strict=False):
            if rows_left < count:
                return f"{path}, row {rows_left + 1:,}"
            rows_left -= count
        return f"row {index + 1:,} of the {len(self._files)} files taken together"

    @cached_property
    def _rows(self) -> list[int]:
        """Rows by file; [] where they cannot be counted quickly."""
        if self._dataset == "parquet":
            import pyarrow.parquet

            return [pyarrow.parquet.read_metadata(path).num_rows for path in self._files]
        if sum(path.stat().st_size for path in self._files) > _MOST_COUNTED:
            return []
        counts = [_count_json_lines(path) for path in self._files]
        if self._dataset != "json" or None in counts:
            return []
        return cast(list[int], counts)


def _count_json_lines(path: Path) -> int | None:
    """None for a file that is one JSON array."""
    with opened(path) as file:
        lines = (line for line in file if line.strip())
        first = next(lines, b"")
        if first.lstrip().startswith(b"["):
            return None
        return bool(first) + sum(1 for _ in lines)


def opened(path: Path) -> IO[bytes]:
    """A file's content, decompressed by its name."""
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if path.suffix == ".zst":
        import zstandard

        # One frame alone is what zstandard.open would read.
        unpacked = zstandard.ZstdDecompressor().stream_reader(
            path.open("rb"), read_across_frames=True
        )
        return io.BufferedReader(unpacked)
    return path.open("rb")
