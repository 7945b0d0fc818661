"""Documents packed into sequences of equal length, and the sequences of a microbatch as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Generic, TypeVar
from zlib import crc32

import numpy as np

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# A label that is no target; the default `ignore_index` of torch's cross entropy.
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Encoded:
    """One document's name and token ids, those that begin and end it included."""

    name: str
    ids: np.ndarray
    is_target: np.ndarray | None = None
    """True for each token that is to be learned; None: all but the first are."""
    cut: int = 0
    """Tokens that the document has behind these."""


@dataclass(frozen=True)
class PackedSequence:
    """One sequence: tokens_S and labels_S int64, documents_S int32, and its documents' names."""

    tokens_S: np.ndarray
    labels_S: np.ndarray
    documents_S: np.ndarray
    samples: list[str]
    cut: Sequence[int] = ()
    """Tokens that each of the documents has lost at its end; none for texts."""


@dataclass
class Packer:
    """Cuts documents, one after the other, into sequences of `seq_len` tokens.

    A document longer than the rest of its sequence goes on in the next one. Each token is an input
    once and, unless it opens a document under `mask_documents`, a target once: a sequence's last
    label is the first token of the next one.
    """

    next_document: Callable[[], Encoded | None]
    """Returns None when there is no more; the last sequence is then padded."""
    seq_len: int
    mask_documents: bool
    padding_id: int
    document: Encoded | None = None
    """The current document; None: the next one is to come."""
    offset: int = 0
    """Tokens of it that are used up."""

    def next_sequence(self) -> PackedSequence | None:
        """Pack one sequence; None when the documents have no target left to give."""
        wanted = self.seq_len + 1  # One more than the inputs: the last label.
        tokens = np.full(wanted, self.padding_id, np.int64)
        documents = np.zeros(wanted, np.int32)
        samples: list[str] = []
        filled = 0
        while filled < wanted:
            if self.document is None or self.offset == len(self.document.ids):
                self.document, self.offset = self.next_document(), 0
                if self.document is None:
                    break
            ids = self.document.ids
            count = min(wanted - filled, len(ids) - self.offset)
            tokens[filled : filled + count] = ids[self.offset : self.offset + count]
            documents[filled : filled + count] = len(samples)
            samples.append(self.document.name)
            filled += count
            self.offset += count
        if filled < 2:
            return None
        documents[filled:] = len(samples)
        labels = tokens[1:].copy()
        labels[filled - 1 :] = IGNORE_INDEX
        if self.mask_documents:
            labels[documents[1:] != documents[:-1]] = IGNORE_INDEX
        if filled == wanted:
            self.offset -= 1  # The last label is the next sequence's first token.
        held = int(documents[min(filled, self.seq_len) - 1]) + 1
        return PackedSequence(tokens[:-1], labels, documents[:-1], samples[:held])


class BestFit(Generic[T]):
    """Puts items into groups of at most `capacity`.

    A group takes the item that has waited longest and then, as long as one fits, the longest that
    does, of a number that wait.
    """

    _WAITING = 64

    def __init__(
        self, next_item: Callable[[], T | None], *, size: Callable[[T], int], capacity: int
    ) -> None:
        """`next_item` returns None when there is no more; no size is above `capacity`."""
        self._next_item, self._size, self._capacity = next_item, size, capacity
        self.waiting: list[T] = []

    def next_group(self) -> list[T]:
        """The items of the next group; none when there is no item left."""
        group: list[T] = []
        space = self._capacity
        while True:
            while len(self.waiting) < self._WAITING and (item := self._next_item()) is not None:
                self.waiting.append(item)
            sizes = list(map(self._size, self.waiting))
            fitting = [place for place, size in enumerate(sizes) if size <= space]
            if not fitting:
                return group
            best = max(fitting, key=sizes.__getitem__) if group else fitting[0]
            space -= sizes[best]
            group.append(self.waiting.pop(best))


def whole_documents(documents: Sequence[Encoded], seq_len: int) -> PackedSequence:
    """One sequence of whole documents. What is left of it repeats its own first tokens, as a
    document without targets: padding of one token would go to one set of experts (as in
    `ignored_sequence`)."""
    ids = np.concatenate([each.ids for each in documents])
    labels = np.full(seq_len, IGNORE_INDEX, np.int64)
    numbers = np.full(seq_len, len(documents), np.int32)
    at = 0
    for number, document in enumerate(documents):
        end = at + len(document.ids)
        numbers[at:end] = number
        targets = document.ids[1:]
        if document.is_target is not None:
            targets = np.where(document.is_target[1:], targets, IGNORE_INDEX)
        labels[at : end - 1] = targets
        at = end
    tokens = np.concatenate([ids, np.resize(ids, seq_len - at)])
    names, cut = [each.name for each in documents], [each.cut for each in documents]
    return PackedSequence(tokens, labels, numbers, names, cut)


def ignored_sequence(like: PackedSequence) -> PackedSequence:
    """A sequence without any target, to fill up a batch: another's tokens, since padding alone
    would send all tokens to the same experts, which do not fit into bounded buffers."""
    labels_S = np.full_like(like.labels_S, IGNORE_INDEX)
    return replace(like, labels_S=labels_S, samples=[], cut=())


@dataclass(frozen=True)
class Batch:
    """One microbatch of one data rank, as CPU tensors.

    tokens_BS: int64, the input.
    labels_BS: int64, the next token at each position; IGNORE_INDEX where there is no target.
    documents_BS: int32, each token's document within its sequence (0, 1, 2, ...), for masks.
    samples: for each sequence the identifiers of the documents it holds, for error reports.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    documents_BS: torch.Tensor
    samples: list[list[str]]


def fingerprints(batch: Batch) -> list[int]:
    """CRC32 of each sequence's tokens, labels and documents, the same in every layout."""
    sequences = zip(batch.tokens_BS, batch.labels_BS, batch.documents_BS, strict=True)
    return [reduce(lambda crc, x_S: crc32(x_S.numpy(), crc), sequence, 0) for sequence in sequences]


def stack_sequences(sequences: Sequence[PackedSequence], *, pin: bool = False) -> Batch:
    """Stack the sequences of one microbatch.

    pin: in page-locked memory, from which CUDA copies without waiting. torch gives such memory out
    again once the tensor is gone and copies from it have ended.
    """
    import torch  # Here, so that the checks before a run need not wait for torch.

    def stack(arrays: Iterable[np.ndarray]) -> torch.Tensor:
        x = torch.from_numpy(np.stack(list(arrays)))
        return x.pin_memory() if pin else x

    return Batch(
        tokens_BS=stack(sequence.tokens_S for sequence in sequences),
        labels_BS=stack(sequence.labels_S for sequence in sequences),
        documents_BS=stack(sequence.documents_S for sequence in sequences),
        samples=[sequence.samples for sequence in sequences],
    )
