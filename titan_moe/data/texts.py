"""Reads the texts of files: one column of JSON, Parquet or CSV, or the pieces of plain text.

No other column is looked at: files of one set may differ in them, and a value may change its type
from one record to the next. A record without a text keeps its place as None: a null, another type
than text, bytes that are not UTF-8, half of a surrogate pair.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from typing import Any

from titan_moe.data.conversations import FIELDS, conversation_text, without_nulls

ENDINGS = {
    "json": (".json", ".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "line": (".txt",),
    "paragraph": (".txt",),
    "csv": (".csv",),
    "tsv": (".tsv",),
}
"""The names of files by format: each may be followed by one of COMPRESSED."""
_SEPARATORS = {"csv": ",", "tsv": "\t"}
COMPRESSED = ("", ".gz", ".zst", ".bz2", ".xz", ".zip")

_STRINGS = ("string", "large_string", "string_view", "null")  # Arrow's types of texts.
_BATCH = 1000  # Documents, and
_CHARACTERS = 4 << 20  # of texts, at which a batch of fewer ends.


class ColumnError(ValueError):
    """A file lacks the column, or has one that holds no texts."""


def read_batches(file: str, form: str, column: str | None) -> Iterator[Any]:
    """Yield the texts of a file as Arrow arrays of large strings, null for a record without a text.

    form: a key of ENDINGS. column: its name, or the path of a field in nested records: "doc.text";
    None: a record is a conversation, whose JSON is the text.
    Raises ColumnError for a Parquet file without such a column, ValueError or OSError for one that
    cannot be read.
    """
    import pyarrow as pa

    if form == "parquet":
        texts = _parquet_texts(file, column)
    elif form in _SEPARATORS:
        texts = _texts_of_rows(file, form, column)
    else:
        texts = _texts_of_lines(_lines(file, "\n" if form == "json" else None), form, column)
    valid = (text if isinstance(text, str) and _is_utf8(text) else None for text in texts)
    while batch := list(_limited(valid)):
        yield pa.array(batch, pa.large_string())


def pick(record: Any, column: str | None) -> Any:
    """The value of a record's column, or of a field in nested records ("doc.text"), else None. With
    a column of None the record's conversation."""
    if column is None:
        return conversation_text(record)
    if not isinstance(record, dict):
        return None
    if column in record:
        return record[column]
    head, _, rest = column.partition(".")
    return pick(record.get(head), rest) if rest else None


def check_column(file: str, form: str, column: str | None) -> None:
    """Raise ColumnError if a Parquet or CSV file lacks the column, ValueError if its schema
    or first row is damaged. No more of it is read."""
    try:
        if form == "parquet":
            _columns(_open_parquet(file), file, column)
        elif form in _SEPARATORS:
            next(_texts_of_rows(file, form, column), None)
    except ColumnError:
        raise
    except Exception as error:
        raise ValueError(f"{file}: {error}") from None


def why_without_texts(file: str, form: str, column: str | None) -> str:
    """Returns the problem of a column that has no text in any of a file's first records."""
    if column is None:
        return (
            f"no record looked at, from {file!r} on, holds `messages` with role and content, "
            "`conversations` with from and value, or `prompt` and `completion`"
        )
    found: dict[str, str] = {}
    records = islice(_records(_lines(file, "\n")), _BATCH) if form == "json" else ()
    for record in records:
        named = record if isinstance(record, dict) else {}
        for name, value in (named | {column: pick(record, column)}).items():
            if value is not None:
                found.setdefault(name, _kind(value))
    if found:
        return _column_problem(file, column, found)
    return f"none of the documents looked at, from {file!r} on, holds a text in UTF-8"


def _column_problem(file: str, column: str, found: dict[str, str]) -> str:
    """found: column names to the types of what they hold."""
    if column in found:
        return f"column {column!r} of {file!r} holds {found[column]}, not text"
    names = ", ".join(list(found)[:20])
    return f"{file!r} has no column {column!r}, but {names}: set text_column to one of them"


def _kind(value: Any) -> str:
    if isinstance(value, str):
        not_utf8 = "bytes that are not UTF-8 (convert the file: iconv -f latin1 -t utf-8)"
        return "empty strings" if _is_utf8(value) else not_utf8
    names = {int: "numbers", float: "numbers", bool: "true and false"}
    return names.get(type(value), f"a {type(value).__name__}")


def _open(file: str) -> Any:
    """Opens a local or remote file, and unpacks it by its first bytes. Raises ValueError for a
    pointer of Git LFS, which a text file would give as its text."""
    if file.startswith("/"):
        raw: Any = io.open(file, "rb")  # noqa: SIM115, UP020
    else:
        from datasets.utils.file_utils import xopen  # With its credentials and retries.

        raw = xopen(file, "rb")
    start = raw.read(32)
    raw.seek(0)
    if start.startswith(b"version https://git-lfs"):
        raise ValueError("is a pointer of Git LFS in place of the file: fetch it (git lfs pull)")
    return next((unpack(raw) for magic, unpack in _PACKED if re.match(magic, start)), raw)


def _lines(file: str, newline: str | None) -> Iterable[str]:
    """Open a text of UTF-8, UTF-16 or UTF-32, told apart by the first bytes. Others become
    surrogates, which no text of UTF-8 has."""
    raw = io.BufferedReader(_open(file))
    start = raw.peek()
    encoding = json.detect_encoding(start)
    if encoding == "utf-8" and b"\0" in start:
        raise ValueError("holds NUL, as no text in UTF-8 does: convert it (iconv -t utf-8)")
    return io.TextIOWrapper(raw, encoding, errors="surrogateescape", newline=newline)


def _open_parquet(file: str) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(_open(file))


def _unzip(raw: Any) -> Any:
    archive = zipfile.ZipFile(raw)
    if len(names := archive.namelist()) != 1:
        raise ValueError(f"a zip archive of {len(names)} files: unpack it")
    return archive.open(names[0])


def _unzstd(raw: Any) -> Any:
    """All frames, of any window: the defaults end after one frame and refuse `zstd --long`."""
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    return unpacker.stream_reader(raw, read_across_frames=True)


_PACKED: list[tuple[bytes, Any]] = [
    (rb"\x1f\x8b\x08", lambda raw: gzip.GzipFile(fileobj=raw)),
    (rb"BZh[1-9]1AY&", bz2.BZ2File),
    (rb"\xfd7zXZ\0", lzma.LZMAFile),
    (rb"\x28\xb5\x2f\xfd|\x50\x2a\x4d\x18", _unzstd),
    (rb"PK\x03\x04", _unzip),
]


def _texts_of_lines(lines: Iterable[str], form: str, column: str | None) -> Iterator[Any]:
    if form == "json":
        for record in _records(lines):
            is_text = isinstance(record, str) and column is not None
            yield record if is_text else pick(record, column)
    elif form == "line":
        yield from (line.removesuffix("\n") for line in lines)
    else:
        for blank, paragraph in groupby(lines, key="\n".__eq__):
            if not blank:
                yield "".join(paragraph).removesuffix("\n")


def _texts_of_rows(file: str, form: str, column: str | None) -> Iterator[str | None]:
    """Pandas would read "NA" and "null" as no text, and take the first value of rows that are
    longer than their names for a name."""
    csv.field_size_limit(sys.maxsize)
    rows = csv.DictReader(_lines(file, ""), delimiter=_SEPARATORS[form], strict=True)
    if rows.fieldnames and column is not None and column not in rows.fieldnames:
        raise ColumnError(_column_problem(file, column, dict.fromkeys(rows.fieldnames, "")))
    line = rows.line_num + 1
    try:
        for row in rows:
            if None in row:
                raise csv.Error(f"more values than the {len(row) - 1} columns have")
            yield row[column] if column is not None else pick(row, None)
            line = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {line}: {error}") from None


# Integers of over 4,300 digits are an error to int.
_parse_json = json.JSONDecoder(parse_int=lambda n: int(n) if len(n) < 4300 else float(n)).decode


def _records(lines: Iterable[str]) -> Iterator[Any]:
    """Yield the values of JSON lines, or of one value over several lines, and of lists in them.
    Raises ValueError with the line."""
    numbered, first = enumerate(lines, 1), True
    for number, line in numbered:
        if not (line := line.strip("\ufeff \t\r\n")):
            continue
        try:
            try:
                value = _parse_json(line)
            except ValueError:
                if not first or line[0] not in "[{":
                    raise
                value = _parse_json("\n".join(chain([line], (rest for _, rest in numbered))))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from None
        first = False
        yield from value if isinstance(value, list) else [value]


def _columns(reader: Any, file: str, column: str | None) -> list[str]:
    """Returns the names that lead to a column of texts in a Parquet file, or for None the fields of
    a conversation. A file without rows passes any name: the types of its columns say nothing."""
    if column is None:
        if held := [name for name in FIELDS if name in reader.schema_arrow.names]:
            return held
        raise ColumnError(why_without_texts(file, "parquet", None))
    found = dict(_fields(reader.schema_arrow))
    kind = found.get(column, "").removeprefix("dictionary<values=").split(",")[0]
    if reader.metadata.num_rows and kind not in _STRINGS and not _in_json(found, column):
        raise ColumnError(_column_problem(file, column, found))
    return [column] if column in reader.schema_arrow.names else column.split(".")


def _parquet_texts(file: str, column: str | None) -> Iterator[str | None]:
    import pyarrow as pa
    import pyarrow.compute as pc

    reader = _open_parquet(file)
    first, *inner = _columns(reader, file, column)
    if column is None or _in_json(dict(_fields(reader.schema_arrow)), column):
        names = [first, *inner] if column is None else [first]
        for batch in reader.iter_batches(_BATCH, columns=names):
            for row in batch.to_pylist():
                yield pick(without_nulls(row, batch.schema, _parse_json), column)
        return
    for batch in reader.iter_batches(_BATCH, columns=[column]) if reader.metadata.num_rows else ():
        texts = pc.struct_field(batch.column(first), inner) if inner else batch.column(first)
        # Arrow's strings may hold bytes that are not UTF-8.
        for text in texts.cast(pa.large_string()).cast(pa.large_binary()).to_pylist():
            yield None if text is None else text.decode(errors="surrogateescape")


def _fields(fields: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and type of an Arrow schema's fields, those of structs after their struct."""
    for field in fields:
        yield prefix + field.name, str(field.type)
        if str(field.type).startswith("struct<"):
            yield from _fields(field.type, f"{prefix}{field.name}.")


def _in_json(found: dict[str, str], column: str) -> bool:
    """Tells whether a column is, or is in, one that `datasets` 5 writes as JSON because its kinds
    of values vary. found: the types of a schema's fields by name."""
    names = column.split(".")
    above = [".".join(names[:number]) for number in range(1, len(names))]
    return "extension<arrow.json>" in [found.get(name) for name in (*above, column)]


def _limited(texts: Iterator[str | None]) -> Iterator[str | None]:
    """Yields the texts of the next batch, which ends at a number of texts or of characters."""
    characters = 0
    for text in islice(texts, _BATCH):
        yield text
        characters += len(text or "")
        if characters > _CHARACTERS:
            return


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
