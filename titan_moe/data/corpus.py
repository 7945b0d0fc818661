"""Corpora of local files, read by `datasets`, and what notices that files have changed."""

from __future__ import annotations

import glob
import hashlib
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import LOCAL_DATASETS
from titan_moe.data.order import Document

FORMATS = {"json": (".json", ".jsonl"), "parquet": (".parquet",), "text": (".txt",)}

SAMPLED = 64 << 20
"""Bytes that a checksum reads of larger sets of files. About 0.1 s from a local disk."""
_BLOCK = 128 << 10


@dataclass(frozen=True)
class Source:
    """One source as the configuration names it; `key` is its table and a dot, for messages."""

    key: str
    dataset: str
    dataset_path: str | None = None
    text_column: str = "text"
    weight: float = 1.0

    @property
    def name(self) -> str:
        """The source as its key and value in the configuration."""
        return f"{self.key}dataset={self.dataset!r}"

    @property
    def path_name(self) -> str:
        """The path as its key and value in the configuration."""
        return f"{self.key}dataset_path={self.dataset_path!r}"

    @property
    def place(self) -> tuple[str, str]:
        """Equal for two names of one source."""
        return self.dataset, os.path.realpath(os.path.expanduser(self.dataset_path or ""))

    @property
    def path(self) -> Path | None:
        return None if self.dataset_path is None else Path(self.dataset_path).expanduser()

    @property
    def is_stream(self) -> bool:
        """True for a hub dataset: read from its beginning on, its length not known."""
        return self.dataset not in LOCAL_DATASETS


def import_datasets() -> Any:
    """Import `datasets` (most of a second) without the notices that every rank would print, and
    without the request that counts each use of a local format at the hub."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    return datasets


def first_cause(error: BaseException) -> str:
    """The first line of the error that began a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]


def find_files(source: Source) -> list[Path]:
    """Find the files that a source's path, a file, folder or glob, names, sorted.

    Raises ConfigError if there is no file.
    """
    if source.path is None:
        needs = f"{source.name} needs {source.key}dataset_path: a file, folder or glob"
        raise ConfigError([needs])
    if source.path.is_dir():
        files = files_below(source.path, source.dataset)
        problem = f"holds no file that ends in {' or '.join(_endings(source.dataset))}"
    else:
        names = glob.glob(str(source.path), recursive=True)
        files = [path for path in map(Path, names) if path.is_file()]
        problem = "does not exist: name a file, a folder or a glob"
    if files and not (files := [path for path in files if path.stat().st_size]):
        problem = "is empty"
    if not files:
        raise ConfigError([f"{source.path_name} {problem}"])
    return sorted(files)


def files_below(folder: Path, *formats: str) -> list[Path]:
    """The files of these formats in a folder and its subfolders, sorted."""
    endings = tuple(ending for name in formats for ending in _endings(name))
    return sorted(
        path for path in folder.rglob("*") if path.name.endswith(endings) and path.is_file()
    )


def _endings(dataset: str) -> list[str]:
    return [end + pack for end in FORMATS[dataset] for pack in ("", ".gz", ".zst")]


class FileCorpus:
    """One column of texts of json or parquet files, or the paragraphs of text files.

    `datasets` converts the files once into memory-mapped Arrow files in its cache (HF_HOME). It
    holds a file lock: of the ranks on a node one converts, and the others wait.
    """

    def __init__(self, source: Source) -> None:
        """ConfigError when the files cannot be read as their format or have no column of texts."""
        dataset = source.dataset
        self.column = "text" if dataset == "text" else source.text_column
        self._name = dataset
        self._files = find_files(source)
        self._table = _load(source, self._files)
        if len(self._table) == 0:
            raise ConfigError([f"{source.path_name} holds no document"])
        kinds = {field.name: str(field.type) for field in self._table.data.schema}
        if kinds.get(self.column) not in ("string", "large_string"):
            raise ConfigError([wrong_column(source, kinds)])
        # The Arrow column itself: a row through `datasets` costs 50 times as much.
        self._texts = self._table.data.column(self.column)
        self.fingerprint = f"{dataset}:{_digest(self._files)}:documents={len(self._table)}"
        self.fingerprint += column_mark(self.column)

    def rows(self) -> Any:
        """The `datasets.Dataset`; for `titan-moe tokenize`."""
        return self._table

    def checksum(self) -> str:
        return sampled_checksum(self._files)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Document:
        try:
            text = self._texts[index].as_py()
        except UnicodeDecodeError:  # `datasets` does not look.
            text = None
        return Document(f"{self._name}/{index}", text)


def _load(source: Source, files: Sequence[Path]) -> Any:
    """The rows of the files as a `datasets.Dataset`; ConfigError if they cannot be read."""
    datasets = import_datasets()
    options: dict[str, dict[str, Any]] = {
        # Left alone, `datasets` puts the strings of a column that holds other things too in quotes.
        "json": {"on_mixed_types": None},
        # Paragraphs (blank lines between them): one large file is many documents then.
        "text": {"sample_by": "paragraph"},
        "parquet": {},
    }
    dataset, names = source.dataset, [str(path) for path in files]
    try:
        table = datasets.load_dataset(dataset, split="train", data_files=names, **options[dataset])
        # Arrow files of the cache that were cut short between two batches are shorter tables.
        if len(table) != table.info.splits["train"].num_examples:
            raise EOFError(f"{table.cache_files[0]['filename']} is damaged: remove its folder")
    except Exception as error:  # Each format raises its own.
        line = f"{source.path_name} cannot be read as {dataset}: {first_cause(error)}"
        raise ConfigError([line]) from None
    return table


def wrong_column(source: Source, found: dict[str, str]) -> str:
    """The error about a column that is missing or holds no texts. found: column names to types."""
    column, key = source.text_column, f"{source.key}text_column"
    where = source.path_name if source.dataset_path else source.name
    if column in found:
        return f"{key}={column!r}: that column of {where} holds {found[column]}, not text"
    names = ", ".join(found)
    return f"{key}={column!r}: {where} has no such column, but {names}: set {key} to one of them"


def column_mark(column: str) -> str:
    """The suffix of a fingerprint for a column other than "text"."""
    return "" if column == "text" else f":column={column}"


def _digest(files: Sequence[Path]) -> str:
    """Digest of names and sizes; the contents may be terabytes."""
    base = Path(os.path.commonpath([path.parent for path in files]))
    listing = "".join(f"{path.relative_to(base)}\0{path.stat().st_size}\0" for path in files)
    return hashlib.blake2b(listing.encode(), digest_size=8).hexdigest()


def sampled_checksum(files: Sequence[Path]) -> str:
    """CRC32 of the bytes of all files, or of samples if they have more than SAMPLED bytes in all.

    A file is sampled by blocks of 128 KiB, the first, the last, and more at equal distances, in
    proportion to its size.
    """
    sizes = [path.stat().st_size for path in files]
    total, crc = sum(sizes), 0
    for path, size in zip(files, sizes, strict=True):
        block = size if total <= SAMPLED else min(size, _BLOCK)
        count = max(2, SAMPLED * size // total // _BLOCK) if block < size else 1
        with path.open("rb") as file:
            for number in range(count):
                file.seek(number * (size - block) // max(count - 1, 1))
                crc = zlib.crc32(file.read(block), crc)
    return f"{crc:08x}"
