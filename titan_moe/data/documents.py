"""What a source of documents is, and how documents are split and ordered.

Everything here is integer arithmetic: the same order on every platform and numpy version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from titan_moe.data.bad_documents import BadDocuments

# One document in this many is held out for validation.
HELD_OUT_EVERY = 64

_MASK = (1 << 64) - 1


class Document(NamedTuple):
    """A document: its text, or its token ids (without EOS) if the corpus is tokenised."""

    name: str
    content: str | np.ndarray
    problem: str = ""
    """Why it has no text that can be read; its content is empty then."""


@runtime_checkable
class Corpus(Protocol):
    """Documents that can be read in any order."""

    fingerprint: str
    """Names the documents and their order: with the same fingerprint both are the same."""
    left_out: BadDocuments
    """Documents that the source holds and that have no number here."""

    def checksum(self) -> str:
        """A sampled one of its files; empty where the fingerprint holds the content."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...


class Stream(Protocol):
    """Files of documents, each of which can only be read from its beginning on."""

    fingerprint: str
    num_files: int
    left_out: BadDocuments
    """As a corpus has."""

    def checksum(self) -> str:
        """As a corpus has; empty for files that are not here."""

    def file(self, index: int) -> Stream:
        """The stream of file `index` alone, with a place of its own."""

    def read(self, mark: Any = None) -> Iterator[Document]:
        """Start at the beginning, or where a `mark` was taken."""

    def mark(self) -> Any:
        """JSON-able position of the latest `read`, after the last document that it yielded."""


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
        """Where `index`, in range(size), goes."""
        assert 0 <= index < self.size
        value = index
        while True:
            high, low = value >> self._half_bits, value & self._half_mask
            for key in self._round_keys:
                high, low = low, high ^ (mix(key ^ low) & self._half_mask)
            value = high << self._half_bits | low
            if value < self.size:
                return value


def count_held_out(num_documents: int) -> int:
    """Documents of a corpus that are held out: one in HELD_OUT_EVERY, but at least one of two."""
    if num_documents < 2:
        return 0
    return max(1, num_documents // HELD_OUT_EVERY)


def is_held_out(index: int, file: int = 0) -> bool:
    """Whether document number `index` of a stream's file is held out (lengths are not known)."""
    return mix(index + (file << 40)) % HELD_OUT_EVERY == 0
