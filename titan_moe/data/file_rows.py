"""JSON lines that need not be in order, and where a document of a set of files stands."""

from __future__ import annotations

import gzip
import io
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, cast

from titan_moe.data.bad_documents import text_problem
from titan_moe.runtime.files import parse_json

# Counting the rows of so much JSON takes a second, and is done for the first bad document only.
_MOST_COUNTED = 1 << 30

NOT_UTF8 = "is not UTF-8"


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

        return io.BufferedReader(zstandard.open(path))
    return path.open("rb")
