"""The documents of one source in the order of training or of validation.

A source is one partition or several (a stream's files, divided). A document order numbers the
documents of each partition by position: 0, 1, 2, ... through all epochs. What stands at a position
depends on (source, seed, number of partitions) alone. Which positions a sequence of the global
batch takes is its `Assignment`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from titan_moe.data.bad_documents import BadDocuments
from titan_moe.data.documents import (
    Corpus,
    Document,
    OutOfDocumentsError,
    Permutation,
    count_held_out,
)


class Split(Enum):
    """Which documents of a source: all but the held-out ones, only those, or every one."""

    TRAIN = "train"
    HELD_OUT = "held_out"
    ALL = "all"


class Assignment(NamedTuple):
    """Which documents the sequences of a global batch of G take from P partitions.

    With P up to G, sequence b takes from partition floor(b P / G), and the sequences of a partition
    take its documents in turn. With P above G, sequence b takes in turn from every partition k with
    floor(k G / P) = b. With one partition, sequence b takes b, b + G, b + 2G, ....
    """

    global_batch_size: int
    num_partitions: int

    def partitions(self, sequence: int) -> range:
        """The partitions that `sequence` takes from, in turn."""
        return _share(sequence, self.global_batch_size, self.num_partitions)

    def sequences(self, partition: int) -> range:
        """The sequences that take from `partition`, in turn."""
        return _share(partition, self.num_partitions, self.global_batch_size)

    def place(self, sequence: int, number: int) -> tuple[int, int]:
        """The partition of document `number` of `sequence`, and its offset there from the position
        at which the sequences began."""
        partitions = self.partitions(sequence)
        turn, which = divmod(number, len(partitions))
        partition = partitions[which]
        sequences = self.sequences(partition)
        return partition, sequence - sequences.start + turn * len(sequences)


def _share(index: int, count: int, of: int) -> range:
    """The numbers j below `of` that belong to `index` of `count`: one or more of its own, or one
    that it has in common with its neighbours."""
    if count >= of:
        return range(index * of // count, index * of // count + 1)
    return range(-(-index * of // count), -(-(index + 1) * of // count))


class DocumentOrder(Protocol):
    """Documents by partition and position."""

    name: str
    """The source as its key and value in the configuration."""
    fingerprint: str
    left_out: BadDocuments
    """Of the source, and without a place in the order."""
    checksum: Callable[[], str]
    """The source's own."""

    @property
    def size(self) -> int | None:
        """Documents of one epoch; None when that is not known beforehand."""

    @property
    def num_partitions(self) -> int:
        """1, but for streams of several files."""

    def document(self, position: int, partition: int = 0) -> Document:
        """The document at `position` (for each sequence, rising); OutOfDocumentsError beyond."""

    def mark(self, oldest: Mapping[int, int]) -> Any:
        """JSON-able places to read on from, by partition at or before position `oldest`; None: not
        needed."""

    def seek(self, mark: Any, first: Sequence[int]) -> None:
        """Go to places that `mark` named, of this rank or of others; in each of the len(first)
        partitions the sequences begin at position `first`, at or after its place."""


class CorpusOrder:
    """A corpus, each epoch in a seeded order of its own (`seed` None: as it lies)."""

    num_partitions = 1

    def __init__(
        self, name: str, corpus: Corpus, *, split: Split, seed: int | None, repeat: bool
    ) -> None:
        self.name = name
        self.fingerprint = corpus.fingerprint
        self.left_out = corpus.left_out
        self.checksum = corpus.checksum
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

    def document(self, position: int, partition: int = 0) -> Document:
        epoch, index = divmod(position, self._size)
        if epoch > 0 and not self._repeat:
            raise OutOfDocumentsError
        if self._seed is not None:
            index = self._epoch_order(epoch)[index]
        index += self._first
        return self._corpus[index if self._split is None else self._split[index]]

    def mark(self, oldest: Mapping[int, int]) -> None:
        return None

    def seek(self, mark: Any, first: Sequence[int]) -> None:
        pass

    def _epoch_order(self, epoch: int) -> Permutation:
        if self._order is None or epoch != self._epoch:
            assert self._seed is not None
            self._epoch, self._order = epoch, Permutation(self._size, self._seed, epoch)
        return self._order
