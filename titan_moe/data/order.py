"""The documents of one source in the order of training or of validation.

A source is one partition or several (a stream's files, divided). A document order numbers the
documents of each partition by position: 0, 1, 2, ... through all epochs. The document at a position
depends on (source, seed, number of partitions) alone. `Assignment` says which positions a sequence
of the global batch takes. All of it is integer arithmetic: the same order on every platform.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

_MASK = (1 << 64) - 1


class Document(NamedTuple):
    """A document: its text, its token ids (without EOS) if the corpus is tokenised, or None where
    the source has neither. A document of None keeps its place and is read as an empty one."""

    name: str
    content: str | np.ndarray | None


@runtime_checkable
class Corpus(Protocol):
    """Documents that can be read in any order."""

    fingerprint: str
    """Names the documents and their order: with the same fingerprint both are the same."""

    def checksum(self) -> str:
        """Sampled checksum of the corpus's files; empty if the fingerprint covers the content."""
        return ""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...


def digest(content: str | bytes) -> str:
    """Returns a short hash of a corpus's content or names, for its fingerprint."""
    # Names of files may hold bytes that are not UTF-8.
    content = content if isinstance(content, bytes) else content.encode(errors="surrogateescape")
    return hashlib.blake2b(content, digest_size=8).hexdigest()


class OutOfDocumentsError(Exception):
    """A source has no document at the position asked for."""


def mix(*words: int) -> int:
    """Hash integers to 64 well-mixed bits (the finaliser of splitmix64, Steele et al. 2014)."""
    state = 0
    for word in words:
        state = (state ^ word) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class Permutation:
    """A seeded bijection of range(size) that needs no table.

    A Feistel network permutes the next larger power of four; values that land outside are sent
    through it again until they land inside ("cycle walking", Black and Rogaway 2002). A billion
    documents are shuffled in no memory, and any position is found without the others.
    """

    _ROUNDS = 4

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = [mix(*key, number) for number in range(self._ROUNDS)]

    def __getitem__(self, index: int) -> int:
        """The place of `index`, in range(size), after the permutation."""
        assert 0 <= index < self.size
        value = index
        while True:
            high, low = value >> self._half_bits, value & self._half_mask
            for key in self._round_keys:
                high, low = low, high ^ (mix(key ^ low) & self._half_mask)
            value = high << self._half_bits | low
            if value < self.size:
                return value


class Split(NamedTuple):
    """The documents of a source to read: those that are held out, or all others."""

    every: int = 0
    """One document in so many is held out; 0: none is."""
    held_out: bool = False
    """Read the documents that are held out."""


class Assignment(NamedTuple):
    """Divides the documents of P partitions among the sequences of a global batch of G.

    Document i of all is the one at position i // P of partition i mod P, and sequence b takes the
    documents b', b' + G, b' + 2G, .... So all partitions are read equally fast, for every P and G,
    and with one partition b' = b. With g = gcd(G, P), b' = (b mod G/g) g + floor(b g / G): then G/g
    neighbours read the same P/g partitions, no more than they must.
    """

    global_batch_size: int
    num_partitions: int

    @property
    def _common(self) -> int:
        return math.gcd(self.global_batch_size, self.num_partitions)

    def partitions(self, sequence: int) -> list[int]:
        """The partitions that `sequence` takes from, in turn."""
        turns = range(self.num_partitions // self._common)
        return [self.place(sequence, number)[0] for number in turns]

    def place(self, sequence: int, number: int) -> tuple[int, int]:
        """The partition of document `number` of `sequence`, and its offset there from the position
        at which the sequences began."""
        common = self._common
        which, turn = divmod(sequence, self.global_batch_size // common)
        document = turn * common + which + number * self.global_batch_size
        return document % self.num_partitions, document // self.num_partitions

    def sequence(self, partition: int, offset: int) -> int:
        """The sequence that takes the document which `place` puts there."""
        document = partition + offset * self.num_partitions
        turn, which = divmod(document % self.global_batch_size, self._common)
        return which * (self.global_batch_size // self._common) + turn


class CorpusOrder:
    """A corpus in one partition; each epoch has its own seeded order (`seed` None: as stored)."""

    num_partitions = 1

    def __init__(
        self, name: str, corpus: Corpus, *, split: Split, seed: int | None, epochs: int | None
    ) -> None:
        """epochs: the number of epochs after which the documents end; None: they do not."""
        self.name = name
        self.fingerprint = corpus.fingerprint
        self.corpus = corpus
        self._seed = seed
        self.epochs = epochs
        # The split is one fixed permutation of the corpus, cut in two; it knows no seed, so that no
        # run ever trains on another run's held-out documents.
        self._split = Permutation(len(corpus)) if split.every and len(corpus) else None
        # One document in `every`, but at least one of two.
        held_out = max(1, len(corpus) // split.every) if split.every and len(corpus) > 1 else 0
        self._first = 0 if split.held_out else held_out
        self.size = held_out if split.held_out else len(corpus) - self._first

    def checksum(self) -> str:
        return self.corpus.checksum()

    def index(self, position: int) -> int:
        """The number in the corpus of the document at `position`. OutOfDocumentsError beyond the
        last epoch."""
        epoch, index = divmod(position, self.size)
        if self.epochs is not None and epoch >= self.epochs:
            raise OutOfDocumentsError
        if self._seed is not None:
            index = Permutation(self.size, self._seed, epoch)[index]
        index += self._first
        return index if self._split is None else self._split[index]

    def document(self, position: int, partition: int = 0) -> Document:
        return self.corpus[self.index(position)]

    def mark(self, oldest: Mapping[int, int]) -> None:
        return None

    def seek(self, mark: Any, first: Sequence[int]) -> None:
        pass
