"""Corpora of local files: json, text and Parquet."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.data.arrow_cache import cached_table
from titan_moe.data.bad_documents import BadDocuments, refusal, text_problem
from titan_moe.data.content import sampled_checksum
from titan_moe.data.documents import Document
from titan_moe.data.file_rows import (
    NOT_UTF8,
    Places,
    broken_line,
    convert_lines,
    overlong_record,
    text_of_line,
)
from titan_moe.data.hf_datasets import import_quietly, no_mixed_types, reason_of
from titan_moe.data.parquet import RefusedError, columns_of, read_texts

SUFFIXES = {"json": (".json", ".jsonl"), "parquet": (".parquet",), "text": (".txt",)}
_SMALL = 16 << 20  # Bytes of JSON that a tenth of a second parses.


def endings_of(dataset: str) -> tuple[str, ...]:
    """Of its files. Parquet compresses its pages itself."""
    packs = ("",) if dataset == "parquet" else ("", ".gz", ".zst")
    return tuple(end + pack for end in SUFFIXES[dataset] for pack in packs)


def find_files(dataset: str, dataset_path: str | None, *, key: str) -> list[Path]:
    """The files that a file, folder or glob names, sorted; ConfigError if there is none to read."""
    if dataset_path is None:
        raise ConfigError(
            [f"{key}dataset={dataset!r} needs {key}dataset_path: a file, folder or glob"]
        )
    prefix = f"{key}dataset_path={dataset_path!r}"
    place = Path(dataset_path).expanduser()
    if place.is_dir():
        endings = endings_of(dataset)
        files = [
            path for path in place.rglob("*") if path.is_file() and path.name.endswith(endings)
        ]
        if not files:
            raise ConfigError([f"{prefix} holds no file that ends in {' or '.join(endings)}"])
    else:
        files = [Path(name) for name in glob.glob(str(place), recursive=True)]
        files = [path for path in files if path.is_file()] or ([place] if place.is_file() else [])
        if not files:
            raise ConfigError([f"{prefix} does not exist: name a file, a folder or a glob"])
    unreadable = [path for path in files if not os.access(path, os.R_OK)]
    if unreadable:
        raise ConfigError([f"{prefix}: no permission to read {unreadable[0]}"])
    if not any(path.stat().st_size for path in files):
        raise ConfigError([f"{prefix} is empty: {len(files)} file(s) of 0 bytes"])
    return sorted(files)


class FileCorpus:
    """One column of json or parquet files, or the paragraphs of text files.

    They are converted once into memory-mapped Arrow files (in the cache of `datasets`, HF_HOME), so
    that any document can be read without the others. A few MiB of JSON lines are held in memory
    instead.
    """

    left_out = BadDocuments()

    def __init__(
        self,
        dataset: str,
        dataset_path: str | None,
        *,
        text_column: str = "text",
        key: str,
        max_bad_documents: float = 1.0,
    ) -> None:
        """ConfigError when the files cannot be read as `dataset` or hold no text, or too many
        documents are seen to have none without reading them."""
        if dataset == "text":
            text_column = "text"  # What `datasets` calls it.
        files = find_files(dataset, dataset_path, key=key)
        prefix = f"{key}dataset_path={dataset_path!r}"
        self._name = dataset
        self._files = files
        self._places = Places(dataset, files)
        self._texts: Any = None
        self._problems: dict[int, str] = {}
        if dataset == "json" and (found := _small_json_lines(files, text_column)):
            self._texts, self._problems = found
        elif dataset == "parquet":
            self._texts = _parquet_texts(files, text_column, f"{key}text_column", prefix)
        else:
            self._convert(files, text_column, key, prefix)
        self.fingerprint = f"{dataset}:{_digest_files(files)}:documents={len(self._texts)}"
        self.fingerprint += column_mark(text_column)
        size, bad = len(self._texts), self._seen_at_once()
        if line := refusal(prefix, bad, seen=size, size=size, most=max_bad_documents):
            raise ConfigError([line])

    def _convert(self, files: list[Path], column: str, key: str, prefix: str) -> None:
        """Read the files by `datasets`; JSON that it refuses, line by line."""
        dataset = self._name
        # Paragraphs (blank lines between them): one large file is many documents then.
        options: dict[str, Any] = {"sample_by": "paragraph"} if dataset == "text" else {}
        datasets = import_quietly()
        if dataset == "json":
            options = no_mixed_types()
        options["data_files"] = [str(path) for path in files]
        done = None
        try:
            cache = Path(datasets.load_dataset_builder(dataset, **options).cache_dir)
            # Converted before, they have been looked through before.
            done = cache if cache.exists() else None
            if not done and (line := overlong_record(dataset, files)):
                raise ConfigError([f"{prefix}: {line}"])
            table = datasets.load_dataset(dataset, split="train", **options)
            if len(table) != table.info.splits["train"].num_examples:  # Cut between two batches.
                raise EOFError("it ends too early")
        except ConfigError:
            raise
        except Exception as error:  # Each format raises its own.
            if done:
                raise ConfigError(
                    [
                        f"{prefix} was read before and is kept in {done}, which is damaged "
                        f"({reason_of(error)}): remove that folder"
                    ]
                ) from None
            lines = convert_lines(files, column) if dataset == "json" else None
            if lines is None:
                why = (dataset == "json" and broken_line(files)) or reason_of(error)
                line = f"{prefix} cannot be read as {dataset}: {why}"
                raise ConfigError([line]) from None
            self._texts = lines.column("text")
            self._problems = _named(lines.column("problem"))
            return
        self._texts = _texts_of(table, column, f"{key}text_column", prefix)

    def checksum(self) -> str:
        return sampled_checksum(self._files)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Document:
        name, value = f"{self._name}/{index}", self._texts[index]
        problem, text = self._problems.get(index, ""), None
        if not problem:
            try:
                text = value if isinstance(value, str) else value.as_py()
                problem = text_problem(text)
            except UnicodeDecodeError:
                problem = NOT_UTF8
        if problem:
            return Document(name, "", f"{problem} ({self._places[index]})")
        return Document(name, str(text))

    def _seen_at_once(self) -> BadDocuments:
        """The bad documents that show without decoding the texts."""
        number = len(self._problems)
        first = min(self._problems, default=0)
        if not isinstance(self._texts, list) and not number and self._texts.null_count:
            number, first = self._texts.null_count, _first_null(self._texts)
        if not number:
            return BadDocuments()
        return BadDocuments(number, f"{self._name}/{first} {self[first].problem}")


def _texts_of(table: Any, column: str, key: str, prefix: str) -> Any:
    """The Arrow column of the texts; ConfigError where there is none."""
    if len(table) == 0:
        raise ConfigError([f"{prefix} holds no document"])
    # The Arrow table itself: a row through `datasets` costs 50 times as much.
    columns = {field.name: str(field.type) for field in table.data.schema}
    _check_column(column, columns, key, prefix)
    return table.data.column(column)


def _check_column(column: str, columns: Mapping[str, str], key: str, prefix: str) -> None:
    """ConfigError where a column of texts is not among those found, by name and Arrow type."""
    if column not in columns:
        raise ConfigError([no_column(key, column, prefix, columns)])
    kind = columns[column].removeprefix("dictionary<values=").partition(",")[0]
    if kind not in ("string", "large_string", "string_view"):
        raise ConfigError([_no_text(key, column, prefix, columns[column], columns)])


def _parquet_texts(files: list[Path], column: str, key: str, prefix: str) -> Any:
    """The Arrow column of the texts of Parquet files; ConfigError where they cannot be read."""
    import pyarrow as pa

    def batches() -> Iterator[Any]:
        for path in files:
            _check_column(column, columns_of(path), key, prefix if len(files) == 1 else str(path))
            yield from read_texts(path, column)

    try:
        schema = pa.schema([("text", pa.large_string())])
        texts = cached_table(f"parquet {column}", files, schema, batches).column("text")
    except ConfigError:
        raise
    except RefusedError as error:
        raise ConfigError([f"{prefix}: {error}"]) from None
    except Exception as error:  # pyarrow has several.
        raise ConfigError([f"{prefix} cannot be read as parquet: {reason_of(error)}"]) from None
    if len(texts) == 0:
        raise ConfigError([f"{prefix} holds no document"])
    return texts


def _first_null(column: Any) -> int:
    """Its index in an Arrow column."""
    import pyarrow.compute

    return int(pyarrow.compute.index(pyarrow.compute.is_null(column), True).as_py())


def no_column(key: str, column: str, prefix: str, found: Iterable[str]) -> str:
    """What to tell about data without the column named by `key`."""
    columns = ", ".join(found)
    return f"{key}={column!r}: {prefix} has no such column, but {columns}: set {key} to one of them"


def _no_text(key: str, column: str, prefix: str, kind: str, found: Iterable[str]) -> str:
    """What to tell about a column that holds something else than text."""
    others = ", ".join(name for name in found if name != column) or "no other"
    return f"{key}={column!r}: that column of {prefix} holds {kind}, not text; it has {others}"


def column_mark(column: str) -> str:
    """What a fingerprint says of the column: nothing of "text", as before others could be named."""
    return "" if column == "text" else f":column={column}"


def _small_json_lines(
    files: list[Path], column: str
) -> tuple[list[str | None], dict[int, str]] | None:
    """The texts of plain JSON-lines files of at most _SMALL bytes in all, and what is wrong with
    those that are none, by index.

    None where that is not what they are: `datasets` then reads them, or knows what is wrong. It
    takes most of a second to import, of every rank's start.
    """
    if sum(path.stat().st_size for path in files) > _SMALL:
        return None
    texts: list[str | None] = []
    problems: dict[int, str] = {}
    try:
        for path in files:
            for line in path.read_bytes().splitlines():
                if line.strip():
                    text, problem = text_of_line(line, column)
                    if problem:
                        problems[len(texts)] = problem
                    texts.append(text)
    except ValueError:
        return None
    return (texts, problems) if len(problems) < len(texts) else None


def _named(problems: Any) -> dict[int, str]:
    """Those of an Arrow column that are not empty, by index."""
    import pyarrow.compute

    where = pyarrow.compute.indices_nonzero(pyarrow.compute.not_equal(problems, ""))
    return {index: problems[index].as_py() for index in where.to_pylist()}


def _digest_files(files: list[Path]) -> str:
    """Digest of names and sizes; the contents may be terabytes."""
    base = Path(os.path.commonpath([path.parent for path in files]))
    listing = "".join(f"{path.relative_to(base)}\0{path.stat().st_size}\0" for path in files)
    return hashlib.blake2b(listing.encode(), digest_size=8).hexdigest()
