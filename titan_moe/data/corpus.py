"""Corpora of local files, read by `datasets`, and what notices that files have changed."""

from __future__ import annotations

import glob
import os
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import LOCAL_DATASETS
from titan_moe.data.order import Corpus, Document, digest
from titan_moe.data.texts import COMPRESSED, ENDINGS, why_without_texts
from titan_moe.runtime.errors import with_remedy

FORMATS = {"json": "json", "parquet": "parquet", "text": "paragraph"}
"""The formats of `texts` by `dataset`. A text file is many documents: blank lines part them."""

_COPIES = (".swp", ".swo", ".bak", ".orig", ".tmp", ".part", ".partial", ".crdownload")
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
FIRST = 1000
"""Documents of a source among which one must have a text."""

SAMPLED = 64 << 20
"""Bytes that a checksum reads of larger sets of files. About 0.1 s from a local disk."""
_BLOCK = 128 << 10


@dataclass(frozen=True)
class Source:
    """One source as the configuration names it; `key` is its table and a dot, for messages."""

    key: str
    dataset: str
    dataset_path: str | None = None
    text_column: str | None = "text"
    """Column of the text; None: each record is a conversation."""
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
    def column_name(self) -> str:
        """The key and value in the configuration that say what a document is."""
        if self.text_column is None:
            return "training.dataset_format='messages'"
        return f"{self.key}text_column={self.text_column!r}"

    @property
    def place(self) -> tuple[str, str]:
        """Equal for two names of one source."""
        return self.dataset, os.path.realpath(self.dataset_path or "")

    @property
    def path(self) -> Path | None:
        return None if self.dataset_path is None else Path(self.dataset_path)

    def required_path(self, what: str) -> Path:
        """`path`; ConfigError if there is none, which says `what` it names."""
        if self.path is None:
            raise ConfigError(f"{self.name} needs {self.key}dataset_path: {what}")
        return self.path

    @property
    def is_stream(self) -> bool:
        """True for a hub dataset: read from its beginning on, its length not known."""
        return self.dataset not in (*LOCAL_DATASETS, *CORPORA)


CORPORA: dict[str, Callable[[Source, Any, int], Corpus]] = {}
"""Opens each kind of local data, from a source, the run's Tokenizer or None, and the seed.
`data/sources.py` adds the program's own kinds."""


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
    return lines[0][:300]


def find_files(source: Source) -> list[Path]:
    """Find the files that a source's path, a file, folder or glob, names, sorted.

    Raises ConfigError if there is no file.
    """
    path = source.required_path("a file, folder or glob")
    files, _ = _listed(path, endings(source.dataset))
    problem = "does not exist: name a file, a folder or a glob"
    if path.is_dir():
        plain = " or ".join(ENDINGS[FORMATS[source.dataset]])
        problem = f"holds no file that ends in {plain}, packed or not"
    if files and not (files := [file for file in files if file.stat().st_size]):
        problem = "is empty"
    if not files:
        raise ConfigError(f"{source.path_name} {problem}")
    return files


def left_out(source: Source, streamed: Collection[Path] = ()) -> list[str]:
    """Returns one line about files in the folder of a source that are not read as data.

    streamed: the files of a local copy that a stream reads, without links.
    """
    if source.path is None or not (source.is_stream or source.dataset in FORMATS):
        return []
    data, others = _listed(source.path, ("",) if source.is_stream else endings(source.dataset))
    others += [path for path in data if source.is_stream and path.resolve() not in streamed]
    if not others:
        return []
    # Names may hold bytes that no terminal shows.
    names = [os.fsencode(path.name).decode(errors="replace") for path in others[:3]]
    names += ["..."] * (len(others) > 3)
    line = f"{source.path_name}: {len(others)} files there are not read as data: {', '.join(names)}"
    return [line]


def is_data(path: PurePath) -> bool:
    """False for hidden files, for copies that editors, notebooks and archives leave, and for the
    descriptions that `datasets` writes beside data. path: relative to the folder that was named."""
    hidden = any(part.startswith((".", "__MACOSX")) for part in path.parts)
    copy = path.name.startswith(("#", "~")) or path.name.endswith(("~", "#", *_COPIES))
    return not hidden and not copy and path.name not in _DESCRIPTIONS


def named_paths(path: Path) -> list[Path]:
    """Returns the file or folder of that name, whatever characters it has, else the sorted matches
    of the name as a glob."""
    base = next(parent for parent in (path, *path.parents) if parent.exists())
    if base == path:
        return [path]
    names = glob.glob(str(path.relative_to(base)), root_dir=base, recursive=True)
    return sorted(base / name for name in names)


def _listed(path: Path, ends: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """Returns the data files of a path, sorted, and the other files in its folder or among its
    glob's matches."""
    if path.is_file():
        return [path], []
    is_folder = path.is_dir()
    found = path.rglob("*") if is_folder else named_paths(path)
    # A link to a folder is listed, and not followed: it may lead into a circle.
    files = sorted(each for each in found if each.is_file() or each.is_symlink())
    data = [f for f in files if is_data(f.relative_to(path) if is_folder else PurePath(f.name))]
    data = [each for each in data if each.is_file()]
    named = [each for each in data if each.name.endswith(ends)]
    if named or is_folder:  # A glob may name files that end otherwise.
        data = named
    return data, sorted(set(files) - set(data))


def endings(dataset: str) -> tuple[str, ...]:
    return tuple(end + pack for end in ENDINGS[FORMATS[dataset]] for pack in COMPRESSED)


class FileCorpus:
    """The texts of json or parquet files, or the paragraphs of text files.

    `datasets` converts the files once into memory-mapped Arrow files in its cache (HF_HOME). It
    holds a file lock: of the ranks on a node one converts, and the others wait.
    """

    def __init__(self, source: Source) -> None:
        """ConfigError when the files cannot be read as their format or have no column of texts."""
        dataset = source.dataset
        self.column = "text" if dataset == "text" else source.text_column
        self._name = dataset
        self._files = find_files(source)
        self._table = _load(source, self._files, self.column)
        # The Arrow column itself: a row through `datasets` costs 50 times as much.
        self._texts = self._table.data.column(0)
        # Names and sizes alone; the contents may be terabytes.
        base = Path(os.path.commonpath([path.parent for path in self._files]))
        listing = [f"{path.relative_to(base)}\0{path.stat().st_size}\0" for path in self._files]
        names = digest("".join(listing))
        self.fingerprint = f"{dataset}:{names}:documents={len(self._table)}"
        self.fingerprint += column_mark(self.column)
        if not any(self[index].content for index in range(0, len(self), -(-len(self) // FIRST))):
            problem = why_without_texts(
                str(self._files[0].absolute()), FORMATS[dataset], self.column
            )
            raise ConfigError(f"{source.column_name}: {problem}")

    def rows(self) -> Any:
        """The `datasets.Dataset`; for `titan-moe tokenize`."""
        return self._table

    def checksum(self) -> str:
        return sampled_checksum(self._files)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Document:
        return Document(f"{self._name}/{index}", self._texts[index].as_py())


def _load(source: Source, files: Sequence[Path], column: str | None) -> Any:
    """The texts of the files as a `datasets.Dataset`; ConfigError if they cannot be read."""
    datasets = import_datasets()
    from titan_moe.data.texts_builder import Texts

    stats = [path.stat() for path in files]
    try:
        builder = Texts(
            files=[str(path.absolute()) for path in files],
            form=FORMATS[source.dataset],
            column=column,
            stamps=[(stat.st_size, stat.st_mtime_ns) for stat in stats],
        )
        builder.download_and_prepare()
        count = builder.info.splits["train"].num_examples
        if count == 0:
            raise ValueError("it holds no document")
        table = builder.as_dataset("train")
        # Arrow files of the cache that were cut short between two batches are shorter tables.
        if len(table) != count:
            raise EOFError(f"{table.cache_files[0]['filename']} is damaged: remove its folder")
    except Exception as error:  # Each format raises its own.
        cause = with_remedy(first_cause(error), Path(datasets.config.HF_DATASETS_CACHE))
        line = f"{source.path_name} cannot be read as {source.dataset}: {cause}"
        raise ConfigError(line) from None
    return table


def column_mark(column: str | None) -> str:
    """The suffix of a fingerprint for documents that are not the column "text"."""
    if column is None:
        return ":messages"
    return "" if column == "text" else f":column={column}"


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
