"""The documents of one source in the order of training or of validation.

A document order numbers its documents by position: 0, 1, 2, ... through all epochs. Sequence b of
the global batch takes the positions f + b, f + b + G, f + b + 2G, ... (G: global batch size; f: 0,
or where a training stage with another G began). What stands at a position depends on (source, seed)
alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from titan_moe.data.documents import (
    Corpus,
    Document,
    OutOfDocumentsError,
    Permutation,
    Stream,
    count_held_out,
    is_held_out,
)


class Split(Enum):
    """Which documents of a source: all but the held-out ones, only those, or every one."""

    TRAIN = "train"
    HELD_OUT = "held_out"
    ALL = "all"


class DocumentOrder(Protocol):
    """Documents by position."""

    name: str
    """The source as its key and value in the configuration."""
    fingerprint: str

    @property
    def size(self) -> int | None:
        """Documents of one epoch; None when that is not known beforehand."""

    def document(self, position: int) -> Document:
        """The document at `position` (for each sequence, rising); OutOfDocumentsError beyond."""

    def mark(self, oldest: int) -> Any:
        """JSON-able place to read on from, at or before position `oldest`; None: not needed."""

    def seek(self, mark: Any, first: int) -> None:
        """Go to a place that `mark` named, of this rank or of another; the sequences begin at
        position `first`, at or after it."""


class CorpusOrder:
    """A corpus, each epoch in a seeded order of its own (`seed` None: as it lies)."""

    def __init__(
        self, name: str, corpus: Corpus, *, split: Split, seed: int | None, repeat: bool
    ) -> None:
        self.name = name
        self.fingerprint = corpus.fingerprint
        self._corpus = corpus
        self._seed = seed
        self._repeat = repeat
        # The split is one fixed permutation of the corpus, cut in two; it knows no seed, so that no
        # run ever trains on another run's held-out documents.
        self._split = Permutation(len(corpus)) if split is not Split.ALL and len(corpus) else None
        held_out = count_held_out(len(corpus))
        self._first = held_out if split is Split.TRAIN else 0
        self._size = held_out if split is Split.HELD_OUT else len(corpus) - self._first
        self._epoch = -1
        self._order: Permutation | None = None

    @property
    def size(self) -> int:
        return self._size

    def document(self, position: int) -> Document:
        epoch, index = divmod(position, self._size)
        if epoch > 0 and not self._repeat:
            raise OutOfDocumentsError
        if self._seed is not None:
            index = self._epoch_order(epoch)[index]
        index += self._first
        return self._corpus[index if self._split is None else self._split[index]]

    def mark(self, oldest: int) -> None:
        return None

    def seek(self, mark: Any, first: int) -> None:
        pass

    def _epoch_order(self, epoch: int) -> Permutation:
        if self._order is None or epoch != self._epoch:
            assert self._seed is not None
            self._epoch, self._order = epoch, Permutation(self._size, self._seed, epoch)
        return self._order


class Cursor(NamedTuple):
    """A place in a stream: before the document at `position`, number `number` of its epoch."""

    position: int
    epoch: int
    number: int
    stream: Any


class StreamOrder:
    """A stream in its own order; a data rank reads all of it and keeps its sequences' documents.

    The price: N data ranks read the stream N times. Where that is too much, tokenize it once
    (titan-moe tokenize) and train on the copy.
    """

    size: int | None = None
    _CURSOR_EVERY = 512  # Positions; a resume reads at most these, and a mark costs about 20 us.

    def __init__(
        self,
        name: str,
        stream: Stream,
        *,
        split: Split,
        sequences: Sequence[int],
        global_batch_size: int,
        repeat: bool,
    ) -> None:
        self.name = name
        self.fingerprint = stream.fingerprint
        self._stream = stream
        self._split = split
        self._global_batch_size = global_batch_size
        self._repeat = repeat
        self._sequences = sequences
        self.seek(None, 0)

    def document(self, position: int) -> Document:
        waiting = self._waiting[(position - self._first) % self._global_batch_size]
        while True:
            while waiting:
                found, document = waiting.popleft()
                if found == position:
                    return document
            assert position >= self._position, "read past already"
            self._read_one()

    def mark(self, oldest: int) -> Any:
        while len(self._marks) > 1 and self._marks[1].position <= oldest:
            self._marks.popleft()
        return list(self._marks[0])

    def seek(self, mark: Any, first: int) -> None:
        self._first = first
        start = Cursor(*mark) if mark else Cursor(0, 0, 0, None)
        self._position, self._epoch, self._number = start.position, start.epoch, start.number
        self._documents: Iterator[Document] = self._stream.read(start.stream)
        self._marks = deque([start])
        self._waiting: dict[int, deque[tuple[int, Document]]] = {
            sequence: deque() for sequence in self._sequences
        }

    def _read_one(self) -> None:
        document = next(self._documents, None)
        if document is None:
            if not self._repeat or self._position == 0:
                raise OutOfDocumentsError
            self._epoch, self._number = self._epoch + 1, 0
            self._documents = self._stream.read()
            return
        number = self._number
        self._number += 1
        if self._split is not Split.ALL and is_held_out(number) != (self._split is Split.HELD_OUT):
            return
        sequence = (self._position - self._first) % self._global_batch_size
        if sequence in self._waiting:
            named = Document(f"{document.name}/{number}", document.content)
            self._waiting[sequence].append((self._position, named))
        self._position += 1
        if self._position % self._CURSOR_EVERY == 0:
            self._marks.append(
                Cursor(self._position, self._epoch, self._number, self._stream.mark())
            )
