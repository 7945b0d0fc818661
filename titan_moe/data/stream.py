"""Hugging Face hub datasets, streamed by `datasets`, in the order of training or of validation."""

from __future__ import annotations

import copy
import glob
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, ClassVar, NamedTuple

import numpy as np

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import LOCAL_DATASETS
from titan_moe.data.conversations import COLUMN, without_nulls
from titan_moe.data.corpus import (
    FIRST,
    FORMATS,
    Source,
    column_mark,
    endings,
    first_cause,
    import_datasets,
    is_data,
    sampled_checksum,
)
from titan_moe.data.order import Assignment, CorpusOrder, Document, OutOfDocumentsError, Split, mix
from titan_moe.data.texts import ENDINGS, ColumnError, check_column, pick, why_without_texts
from titan_moe.runtime.errors import RunError

# Short names for hub datasets: repository, configuration, split.
_ALIASES = {
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
}
# A rank that reads all partitions has a file of each open, with some 10 MB of it in memory.
_MOST_PARTITIONS = 64
# Partitions of files may differ by so much: a pass of one ends by so much before another's.
_UNEQUAL = 0.01


class HubStream:
    """A hub dataset, or a local copy of one, read file by file without keeping it."""

    def __init__(self, source: Source) -> None:
        """Open `c4`, `owner/name` or `owner/name:configuration`, with `@revision` if
        it is not the latest. ConfigError if not found."""
        name, _, revision = source.dataset.partition("@")
        repository, _, configuration = name.partition(":")
        repository, configuration, split = _ALIASES.get(name, (repository, configuration, "train"))
        place = source.path
        self.column, self._source = source.text_column, source
        self.fingerprint = f"hub:{source.dataset}{column_mark(self.column)}"
        try:
            if place is not None:
                builder = _builder_of_copy(place, split)
            else:
                load = import_datasets().load_dataset_builder
                builder = load(repository, configuration or None, revision=revision or None)
                # The commit that the names in the builder lead to, whatever is pushed later.
                self.fingerprint += f":revision={builder.hash}"
            self._builder, self._split, form, sizes = _texts_of(builder, split, self.column)
            self._rows = self._builder.as_streaming_dataset(split=self._split)
            self.num_files: int = self._rows.num_shards
            self.sizes = list(sizes.values()) if len(sizes) == self.num_files else []
            """Bytes by file; empty where `datasets` divides the data otherwise."""
            self._files = list(sizes) if self.sizes else []
            self.local = {Path(file): size for file, size in sizes.items() if file[0] == "/"}
            """Bytes by file of a local copy."""
            self._beginning = self._rows.state_dict()
            features = self._rows.features
            self._schema = None if features is None else features.arrow_schema
            for path in self.local:
                check_column(str(path), form, self.column)
            first = [document.content for document in islice(self.read(), FIRST)]
            if first and not any(first):
                raise ColumnError(why_without_texts(next(iter(sizes)), form, self.column))
        except ColumnError as error:
            raise ConfigError(f"{source.column_name}: {error}") from None
        except Exception as error:  # Network, permission, format: each raises its own.
            remedy = f"; name a whole local copy with {source.key}dataset_path, or use "
            remedy = "" if place else remedy + ", ".join(LOCAL_DATASETS)
            name = source.path_name if place else source.name
            raise ConfigError(f"{name} cannot be opened: {first_cause(error)}{remedy}") from None

    def checksum(self) -> str:
        """Sampled checksum of a local copy; empty for remote data."""
        return sampled_checksum(list(self.local)) if self.local else ""

    def rows(self) -> Any:
        """The whole data as a `datasets.Dataset`, downloaded to its cache."""
        self._builder.download_and_prepare()
        return self._builder.as_dataset(self._split)

    def text(self, row: dict[str, Any]) -> str | None:
        """The text of a row, or its conversation as JSON."""
        if COLUMN in row:
            text = row[COLUMN]
        else:  # Its JSON is read already.
            text = pick(without_nulls(row, self._schema, lambda value: value), self.column)
        return text if isinstance(text, str) else None

    def shard(self, index: int, count: int) -> HubStream:
        """Part `index` of `count` of the files, with a place of its own."""
        one = copy.copy(self)
        one._rows = self._rows.shard(num_shards=count, index=index)
        one._beginning = one._rows.state_dict()
        one._files = list(np.array_split(self._files, count)[index])
        return one

    def read(self, mark: Any = None) -> Iterator[Document]:
        """Start at the beginning, or at the place where `mark` was taken. Raises
        ColumnError if a file lacks the column, ValueError if one is damaged, and RunError if a
        local file has another size than when the run began."""
        # The beginning is loaded too: a state, once loaded, is the start of every later iteration.
        self._rows.load_state_dict(mark or self._beginning)
        try:
            for row in self._rows:
                yield Document(self._source.dataset, self.text(row))
        except Exception as error:
            state, cause = self._rows.state_dict(), first_cause(error)
            while "examples_iterable" in state:
                state = state["examples_iterable"]
            file = "".join(self._files[state["shard_idx"] :][:1])
            if isinstance(error, ColumnError) or file in cause:  # Or not known.
                raise
            read = state["shard_example_idx"]
            raise ValueError(f"{file}: after document {read:,}: {cause}") from None
        # JSON lines that were cut between two of them just end. A removed file was read to its end.
        for path, size in self.local.items():
            if path.exists() and path.stat().st_size != size:
                raise RunError(f"{path} has changed since the run began: put the old file back")

    def mark(self) -> Any:
        """JSON-able position of the latest `read`, after the last document that it yielded."""
        return self._rows.state_dict()


class HubCorpus:
    """A hub dataset as a corpus: `datasets` downloads it to its cache, once on a node."""

    def __init__(self, source: Source) -> None:
        """Raises ConfigError as `HubStream` does, and when the data cannot be downloaded."""
        self._stream = HubStream(source)
        self._name, self.fingerprint = source.dataset, self._stream.fingerprint
        try:
            self._rows = self._stream.rows()
        except Exception as error:  # Network, disk, format: each raises its own.
            name = source.path_name if source.path else source.name
            raise ConfigError(f"{name} cannot be read: {first_cause(error)}") from None

    def checksum(self) -> str:
        return self._stream.checksum()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Document:
        return Document(f"{self._name}/{index}", self._stream.text(self._rows[index]))


def _builder_of_copy(place: Path, split: str) -> Any:
    """The builder of `datasets` for a folder, or a file, of a hub dataset."""
    load, name = import_datasets().load_dataset_builder, str(place.absolute())
    names = [name] if place.is_file() else [str(path) for path in place.absolute().rglob("*")]
    if chained := [path for path in names if "::" in path]:
        raise ValueError(f"rename {chained[0]}: `datasets` reads :: as a chain of file systems")
    if place.is_dir() and glob.escape(name) == name:
        return load(name)
    # `datasets` expands [, * and ? in a folder's name. To a format it takes a pattern instead.
    forms = [form for form in FORMATS for path in names if path.endswith(endings(form))]
    form, pattern = max(forms, key=forms.count, default="json"), glob.escape(name)
    if place.is_file():
        return load(form, data_files={split: pattern})
    return load(form, data_dir=pattern)


def _texts_of(builder: Any, split: str, column: str | None) -> tuple[Any, str, str, dict[str, int]]:
    """The builder of a dataset's texts and its split; the format, and the sizes of the files by
    their addresses."""
    from datasets.utils.file_utils import xgetsize

    config = vars(builder.config)
    named = (config.get("data_files") or {}).get(split, [])
    files = [file for file in named if is_data(PurePath(PurePath(file).name))]
    sizes = {file: size for file in files if (size := xgetsize(file))}
    if not sizes:
        raise ValueError(f"it has no files of the split {split!r}")
    separator = {",": "csv", "\t": "tsv"}.get(config.get("sep", ""))
    form = {"text": config.get("sample_by"), "csv": separator}.get(builder.name, builder.name)
    if form in ENDINGS and not config.get("field") and not config.get("names"):
        from titan_moe.data.texts_builder import Texts

        texts = Texts(files=list(sizes), form=form, column=column, hash=builder.hash)
        return texts, "train", form, sizes
    return builder, split, "", sizes


class _Cursor(NamedTuple):
    """A place in a partition of a stream: before the document at `position`; `stream`: the mark
    there."""

    position: int
    stream: Any


def _num_partitions(sizes: Sequence[int], global_batch_size: int) -> int:
    """The most equally large partitions of whole files, by the bytes of each file. Sequences use up
    tokens equally fast, so that equal bytes last equally long."""
    for count in range(min(len(sizes), global_batch_size, _MOST_PARTITIONS), 1, -1):
        shares = [int(share.sum()) for share in np.array_split(sizes, count)]
        if global_batch_size % count == 0 and max(shares) <= (1 + _UNEQUAL) * min(shares):
            return count
    return 1


@dataclass
class StreamOrder:
    """A stream of files in P partitions, of which a data rank reads those of its sequences.

    A partition is some files in a row, if the files can be divided equally. If they cannot, P is 1,
    and every data rank reads all files to take its documents out: N ranks read the stream N times.
    With `repeat` a partition begins again at its first file, at its own pace. P follows from the
    files and from the global batch at which a run begins, and stays when a training stage changes
    that.
    """

    size: ClassVar[int | None] = None
    CURSOR_EVERY = 512  # Positions; a resume reads at most these, and a mark costs about 20 us.

    name: str
    stream: HubStream
    split: Split
    sequences: Collection[int]
    """Names the sequences of the global batch that this rank reads."""
    global_batch_size: int
    repeat: bool

    def __post_init__(self) -> None:
        self.fingerprint = f"{self.stream.fingerprint}:files={self.stream.num_files}"
        self.seek(None, [0] * _num_partitions(self.stream.sizes, self.global_batch_size))

    @property
    def description(self) -> str:
        """Phrase that says how the files are read."""
        files, parts = self.stream.num_files, self.num_partitions
        whole = "all data ranks read all of them" if parts == 1 else f"{parts} partitions of them"
        return f"a stream of {files:,} files ({whole}), whose number of documents is not known"

    def checksum(self) -> str:
        return self.stream.checksum()

    def document(self, position: int, partition: int = 0) -> Document:
        """The document at `position`. A sequence's positions must rise. OutOfDocumentsError beyond
        the last document."""
        return self._partitions[partition].document(position)

    def mark(self, oldest: Mapping[int, int]) -> Any:
        """JSON-able places to read on from: for each partition of `oldest`, one at or before the
        position given there; None for a partition that this rank does not read."""
        return [
            list(self._partitions[number].mark(oldest[number])) if number in oldest else None
            for number in range(self.num_partitions)
        ]

    def seek(self, mark: Any, first: Sequence[int]) -> None:
        """Go to places that `mark` returned on this rank or on others. In each of the len(first)
        partitions the sequences begin at position `first`, at or after its place."""
        self.num_partitions = len(first)
        self.assignment = Assignment(self.global_batch_size, len(first))
        wanted: dict[int, list[int]] = {}
        for sequence in self.sequences:
            for number in self.assignment.partitions(sequence):
                wanted.setdefault(number, []).append(sequence)
        self._partitions = {}
        for number, sequences in wanted.items():
            start = _Cursor(*mark[number]) if mark else _Cursor(0, None)
            stream = self.stream.shard(number, len(first))
            part = _Partition(self, stream, number, sequences, start, first[number])
            self._partitions[number] = part

    def accepts(self, document: Document) -> bool:
        """False for documents of the other half of the split. One document in `every` is held out
        by its text, the same in every partition and run."""
        if not self.split.every:
            return True
        text = document.content if isinstance(document.content, str) else ""
        held_out = mix(zlib.crc32(text.encode(errors="replace"))) % self.split.every == 0
        return held_out == self.split.held_out


class _Partition:
    """Reads one partition and keeps the documents of this rank's sequences."""

    def __init__(
        self,
        order: StreamOrder,
        stream: HubStream,
        number: int,
        wanted: Sequence[int],
        start: _Cursor,
        first: int,
    ) -> None:
        """Reads on from `start`. The order's assignment deals the documents from position `first`
        on to the sequences, of which `wanted` are this rank's."""
        self._order, self._stream, self._number, self._first = order, stream, number, first
        self._waiting: dict[int, deque[tuple[int, Document]]] = {taker: deque() for taker in wanted}
        self._marks = deque([start])
        self._position = start.position
        self._documents = stream.read(start.stream)

    def document(self, position: int) -> Document:
        waiting = self._waiting[self._taker(position)]
        while True:
            while waiting:
                found, document = waiting.popleft()
                if found == position:
                    return document
            assert position >= self._position, "positions must rise"
            self._read_one()

    def mark(self, oldest: int) -> _Cursor:
        """The last cursor at or before `oldest`. Forgets the cursors before it."""
        while len(self._marks) > 1 and self._marks[1].position <= oldest:
            self._marks.popleft()
        return self._marks[0]

    def _taker(self, position: int) -> int:
        return self._order.assignment.sequence(self._number, position - self._first)

    def _read_one(self) -> None:
        document = next(self._documents, None)
        if document is None:
            if not self._order.repeat or self._position == 0:
                raise OutOfDocumentsError
            self._documents = self._stream.read()
        elif self._order.accepts(document):
            if (taker := self._taker(self._position)) in self._waiting:
                name = f"{document.name}/{self._number}/{self._position}"
                self._waiting[taker].append((self._position, Document(name, document.content)))
            self._position += 1
            if self._position % StreamOrder.CURSOR_EVERY == 0:
                self._marks.append(_Cursor(self._position, self._stream.mark()))


DocumentOrder = CorpusOrder | StreamOrder
