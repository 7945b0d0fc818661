"""JSON lines that need not be in order, records that are too long, and where a document of a set of
files stands."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

from titan_moe.config.errors import ConfigError
from titan_moe.data.arrow_cache import cached_table
from titan_moe.data.bad_documents import text_problem
from titan_moe.runtime.files import parse_json

# Counting the rows of so much JSON takes a second, and is done for the first bad document only.
_MOST_COUNTED = 1 << 30

NOT_UTF8 = "is not UTF-8"

LONGEST_RECORD = 64 << 20
"""Bytes of one document of a compressed file, which may be a thousand times as long as the file. A
plain file is as long as it is."""
MOST_TIMES = 1000
"""Its own size that a file may unpack to, beyond the first GiB. Texts compress 2 to 100 times, and
gzip packs nothing more than 1,032 times."""
_ALWAYS = 1 << 30
_BLOCK = 1 << 20
_SEPARATORS = {"json": b"\n", "text": b"\n\n"}
_REMEDIES = {
    "json": "write each record on a line of its own, or unpack a file that is one JSON array",
    "text": "separate documents by blank lines",
}


def most_unpacked(path: Path) -> int:
    """Bytes that a compressed file may unpack to."""
    return max(_ALWAYS, MOST_TIMES * path.stat().st_size)


def unpacks_too_far(path: Path, otherwise: str = "unpack it") -> str:
    """What to say of a file that unpacks to more; `otherwise`: what to do if this is meant."""
    return (
        f"{path} unpacks to more than {most_unpacked(path) / 2**30:,.1f} GiB, {MOST_TIMES:,} times "
        f"its own size or more: remove it, or {otherwise} if this is meant"
    )


def overlong_record(dataset: str, files: Sequence[Path]) -> str:
    """What is too long to be read of compressed json or text files, a record or all of a file, in
    words; empty where nothing is. Decompresses everything, a block at a time.

    Nothing is said of a file that cannot be read: reading it as data will say why.
    """
    for path in files:
        if dataset in _SEPARATORS and path.suffix in (".gz", ".zst"):
            with suppress(Exception), opened(path) as file:  # Each format raises its own.
                unpacked = _Counted(file, most_unpacked(path))
                line = _overlong(unpacked, dataset)
                if unpacked.left < 0:
                    return unpacks_too_far(path)
                if line:
                    return (
                        f"the {'record' if dataset == 'json' else 'paragraph'} that begins in line "
                        f"{line:,} of {path} is longer than {LONGEST_RECORD >> 20} MiB, the most "
                        f"that one of a compressed file may be: {_REMEDIES[dataset]}"
                    )
    return ""


class _Counted:
    """A file that ends when more than `left` bytes have been read of it."""

    def __init__(self, file: IO[bytes], left: int) -> None:
        self._file = file
        self.left = left

    def read(self, size: int) -> bytes:
        block = self._file.read(size) if self.left >= 0 else b""
        self.left -= len(block)
        return block


def _overlong(file: IO[bytes] | _Counted, dataset: str) -> int:
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


def convert_lines(files: list[Path], column: str) -> Any:
    """JSON lines that `datasets` does not read, as an Arrow table of texts and problems; None where
    they are not JSON lines, or none holds a text."""
    import pyarrow as pa

    schema = pa.schema([("text", pa.large_string()), ("problem", pa.string())])

    def batches() -> Iterator[Any]:
        texts: list[str | None] = []
        problems: list[str] = []
        size = 0
        for text, problem in _lines(files, column):
            texts.append(text)
            problems.append(problem)
            size += len(text or "") + 100
            if size > 1 << 20:
                yield pa.record_batch([texts, problems], schema=schema)
                texts, problems, size = [], [], 0
        yield pa.record_batch([texts, problems], schema=schema)

    try:
        table = cached_table(f"json lines {column}", files, schema, batches)
    except ConfigError:
        raise
    except Exception:  # Each format raises its own.
        return None
    return table if table.column("text").null_count < len(table) else None


def _lines(files: list[Path], column: str) -> Iterator[tuple[str | None, str]]:
    """The text of each line and what is wrong with it. ValueError where one is no JSON record."""
    for path in files:
        with opened(path) as file:
            for line in file:
                if line.strip():
                    yield text_of_line(line, column)


class Places:
    """File and line of each JSON record, or file and row of another document, in words; both are
    counted from 1, and blank lines are lines."""

    def __init__(self, dataset: str, files: Sequence[Path]) -> None:
        """dataset: json, parquet or text."""
        self._dataset = dataset
        self._files = files

    def __getitem__(self, index: int) -> str:
        number = index + 1
        for path, (count, blank_lines) in zip(self._files, self._rows, strict=False):
            if number <= count:
                for line in blank_lines:
                    number += line <= number
                return f"{path}, {'line' if self._dataset == 'json' else 'row'} {number:,}"
            number -= count
        if len(self._files) == 1:
            return f"{self._files[0]}, row {index + 1:,}"
        return f"row {index + 1:,} of the {len(self._files)} files taken together"

    @cached_property
    def _rows(self) -> list[tuple[int, list[int]]]:
        """Rows and blank lines by file; [] where they cannot be counted quickly."""
        if self._dataset == "parquet":
            import pyarrow.parquet

            return [(pyarrow.parquet.read_metadata(path).num_rows, []) for path in self._files]
        if sum(path.stat().st_size for path in self._files) > _MOST_COUNTED:
            return []
        counts = [_count_json_lines(path) for path in self._files]
        if self._dataset != "json" or None in counts:
            return []
        return cast(list[tuple[int, list[int]]], counts)


def _count_json_lines(path: Path) -> tuple[int, list[int]] | None:
    """Records, and the numbers of blank lines; None for a file that is one JSON array."""
    blank: list[int] = []
    number = 0
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                blank.append(number)
            elif len(blank) == number - 1 and line.lstrip().startswith(b"["):
                return None
    return number - len(blank), blank


def broken_line(files: Sequence[Path]) -> str:
    """Names the first line that is no JSON object, counted from 1; empty where the files are no
    JSON lines, or no line is at fault."""
    with suppress(Exception):  # Each format raises its own: reading them as data says why.
        for path in files:
            with opened(path) as file:
                for number, line in enumerate(file, 1):
                    try:
                        if line.strip():
                            text_of_line(line, "")
                    except ValueError as error:
                        return "" if number == 1 else f"line {number:,} of {path}: {error}"
    return ""


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
