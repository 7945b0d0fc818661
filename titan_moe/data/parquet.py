"""The column of texts of a Parquet file, in memory that does not follow what the file claims.

A Parquet file may unpack to millions of times its size: a value is stored once and repeated by
number, and a page of zeros compresses to nothing. What bounds the memory:

- The headers of the column's pages are read first. pyarrow unpacks a page whole, and never to
  another size than its header's. The sizes in the footer are claims, and are not believed.
- Then rows are read a few at a time. No value is longer than its page or its dictionary, so the
  largest of them says how many rows are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from titan_moe.data.file_rows import LONGEST_RECORD, most_unpacked, unpacks_too_far

LARGEST_PAGE = 512 << 20
"""Bytes. pyarrow writes pages of 1 MiB, or of 1,024 documents if those are more."""
_BATCH = 64 << 20  # Bytes of rows that are read together, at most; or one row.
_MOST_ROWS = 1 << 16
_PLAIN = "write it without dictionaries and compression"


class RefusedError(Exception):
    """A file that unpacks to more than is read; says which and how to write it."""


def columns_of(path: Path) -> dict[str, str]:
    """Arrow types by name of the columns. Errors are pyarrow's own."""
    import pyarrow.parquet

    schema = pyarrow.parquet.read_schema(path)
    return {field.name: str(field.type) for field in schema}


def read_texts(path: Path, column: str) -> Iterator[Any]:
    """The column as Arrow batches of one column, `text`, of type large_string.

    RefusedError; what else is wrong with a file pyarrow raises.
    """
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.parquet

    # Without a buffer ahead: it would hold all compressed bytes of a row group.
    with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
        largest = _check_pages(path, file.metadata, column)
        rows = max(1, min(_MOST_ROWS, _BATCH // max(1, largest)))
        number, unpacked, most = 0, 0, most_unpacked(path)
        for batch in file.iter_batches(rows, columns=[column], use_threads=False):
            texts = _strings(batch.column(0))
            lengths = pyarrow.compute.binary_length(texts)
            if (pyarrow.compute.max(lengths).as_py() or 0) > LONGEST_RECORD:
                long = pyarrow.compute.greater(lengths, LONGEST_RECORD)
                row = number + pyarrow.compute.index(long, True).as_py() + 1
                raise RefusedError(
                    f"the text in row {row:,} of {path} is longer than {LONGEST_RECORD >> 20} MiB, "
                    "the most that one of a Parquet file may be: divide it"
                )
            number += batch.num_rows
            unpacked += batch.nbytes
            if unpacked > most:
                raise RefusedError(unpacks_too_far(path, _PLAIN))
            yield pa.record_batch([texts], names=["text"])


def _strings(column: Any) -> Any:
    """A column of texts as large_string; of a dictionary, which its pages bound, each row's own."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.large_string())


def _check_pages(path: Path, metadata: Any, column: str) -> int:
    """Bytes that the largest page of a column unpacks to; RefusedError if that is too much, or all
    of them are."""
    names = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    index, largest = names.index(column), 0
    packed, unpacked, most = 0, 0, most_unpacked(path)
    with path.open("rb") as file:
        for group in range(metadata.num_row_groups):
            chunk = metadata.row_group(group).column(index)
            # The first page. A chunk without values has no data page, at 0.
            pages = [chunk.data_page_offset]
            if chunk.has_dictionary_page:
                pages.append(chunk.dictionary_page_offset)
            start = min(filter(None, pages), default=0)
            packed += chunk.total_compressed_size
            if packed > path.stat().st_size:
                raise RefusedError(
                    f"row group {group + 1} of {path} lies outside the file or in another"
                )
            for size in _page_sizes(file, start, start + chunk.total_compressed_size):
                largest, unpacked = max(largest, size), unpacked + size
                if unpacked > most:
                    raise RefusedError(unpacks_too_far(path, _PLAIN))
                if size > LARGEST_PAGE:
                    raise RefusedError(
                        f"a page of row group {group + 1} of {path} unpacks to {size >> 20:,} MiB, "
                        f"and the most that is read is {LARGEST_PAGE >> 20} MiB: write the file "
                        "with smaller pages (pyarrow's write_batch_size)"
                    )
    return largest


def _page_sizes(file: IO[bytes], start: int, end: int) -> Iterator[int]:
    """What each page of a column chunk between two offsets unpacks to, by its header."""
    while start < end:
        file.seek(start)
        header = _Header(file)
        sizes = header.uncompressed_size, header.compressed_size
        if min(sizes) < 0:
            raise ValueError(f"the page at byte {start} has no size")
        yield header.uncompressed_size
        start = file.tell() + header.compressed_size


class _Header:
    """Of a page: a struct in Thrift's compact protocol, of which two fields are wanted.

    https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift and
    https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
    """

    _LARGEST = 16 << 20  # As pyarrow's own limit: bytes of statistics.
    _DEEPEST = 8

    def __init__(self, file: IO[bytes]) -> None:
        """Reads from the file's position on. ValueError if there is no header."""
        self._file = file
        self._left = self._LARGEST
        self.uncompressed_size = self.compressed_size = -1
        for field, kind in self._fields():
            if kind == _I32 and field in (2, 3):
                value = self._integer()
                if field == 2:
                    self.uncompressed_size = value
                else:
                    self.compressed_size = value
            else:
                self._skip(kind, 0)

    def _fields(self) -> Iterator[tuple[int, int]]:
        """Number and type of each field of a struct, whose value the caller reads."""
        field = 0
        while first := self._byte():
            delta, kind = first >> 4, first & 15
            field = field + delta if delta else self._integer()
            yield field, kind

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, count: int) -> bytes:
        self._left -= count
        found = self._file.read(count) if count >= 0 and self._left >= 0 else b""
        if len(found) != count:
            raise ValueError("a page header is cut or too long")
        return found

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a page header holds a number without an end")

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _skip(self, kind: int, depth: int) -> None:
        if depth > self._DEEPEST:
            raise ValueError("a page header nests too deep")
        if kind in (_TRUE, _FALSE):
            return
        if kind == _BYTE:
            self._byte()
        elif kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _DOUBLE:
            self._bytes(8)
        elif kind == _BINARY:
            self._bytes(self._varint())
        elif kind == _STRUCT:
            for _, inner in self._fields():
                self._skip(inner, depth + 1)
        else:  # Lists and maps: a page's header has none.
            raise ValueError(f"a page header holds a field of type {kind}")


_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY = range(1, 9)
_STRUCT = 12
