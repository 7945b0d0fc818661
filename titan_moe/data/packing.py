"""Packing documents into sequences of equal length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from titan_moe.runtime.errors import RunError

# A label that is no target; the default `ignore_index` of torch's cross entropy.
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Encoded:
    """One document's name and token ids, those that begin and end it included."""

    name: str
    ids: np.ndarray
    is_target: np.ndarray | None = None
    """True for each token that is to be learned; None: all but the first are."""
    place: tuple[int, int] = (0, 0)
    """Its source, and its number among the documents of a sequence."""


@dataclass(frozen=True)
class PackedSequence:
    """One sequence: tokens_S and labels_S int64, documents_S int32, and its documents' names."""

    tokens_S: np.ndarray
    labels_S: np.ndarray
    documents_S: np.ndarray
    samples: list[str]


class Packer:
    """Cuts documents, one after the other, into sequences of `seq_len` tokens.

    A document longer than the rest of its sequence goes on in the next one. Each token is an input
    once and, unless it opens a document under `mask_documents`, a target once: a sequence's last
    label is the first token of the next one.
    """

    def __init__(
        self,
        next_document: Callable[[], Encoded | None],
        *,
        seq_len: int,
        mask_documents: bool,
        padding_id: int,
    ) -> None:
        """`next_document` returns None when there is no more; the last sequence is then padded."""
        self._next_document = next_document
        self._seq_len = seq_len
        self._mask_documents = mask_documents
        self._padding_id = padding_id
        self._document: Encoded | None = None
        self.offset = 0
        """Tokens of the current document that are used up."""

    def resume(self, document: Encoded | None, offset: int) -> None:
        """Go on `offset` tokens into `document`; None: with the next one."""
        self._document, self.offset = document, offset

    def next_sequence(self) -> PackedSequence | None:
        """Pack one sequence; None when the documents have no target left to give."""
        wanted = self._seq_len + 1  # One more than the inputs: the last label.
        tokens = np.full(wanted, self._padding_id, np.int64)
        documents = np.zeros(wanted, np.int32)
        samples: list[str] = []
        filled = 0
        while filled < wanted:
            if self._document is None or self.offset == len(self._document.ids):
                self._document, self.offset = self._next_document(), 0
                if self._document is None:
                    break
            ids = self._document.ids
            count = min(wanted - filled, len(ids) - self.offset)
            tokens[filled : filled + count] = ids[self.offset : self.offset + count]
            documents[filled : filled + count] = len(samples)
            samples.append(self._document.name)
            filled += count
            self.offset += count
        if filled < 2:
            return None
        documents[filled:] = len(samples)
        labels = tokens[1:].copy()
        labels[filled - 1 :] = IGNORE_INDEX
        if self._mask_documents:
            labels[documents[1:] != documents[:-1]] = IGNORE_INDEX
        if filled == wanted:
            self.offset -= 1  # The last label is the next sequence's first token.
        held = int(documents[min(filled, self._seq_len) - 1]) + 1
        return PackedSequence(tokens[:-1], labels, documents[:-1], samples[:held])


class BestFitPacker:
    """Puts whole documents into sequences of `seq_len` tokens, none longer than that.

    A sequence takes the document that has waited longest and then, as long as one fits, the longest
    that does, of a number that wait. What is left of it repeats its own first tokens, as a document
    without targets: padding of one token would go to one set of experts (as in `ignored_sequence`).
    """

    _WAITING = 64

    def __init__(self, next_document: Callable[[], Encoded | None], *, seq_len: int) -> None:
        """`next_document` returns None, or raises RunError, when there is no more."""
        self._next_document = next_document
        self._seq_len = seq_len
        self.waiting: list[Encoded] = []
        self._end: RunError | None = None
        self._has_ended = False

    @property
    def places(self) -> list[tuple[int, int]]:
        """The sources and numbers of the documents that wait."""
        return [each.place for each in self.waiting]

    def next_sequence(self) -> PackedSequence | None:
        """Pack one sequence; None when there is no document left, or the error that said so."""
        chosen: list[Encoded] = []
        space = self._seq_len
        while fitting := [each for each in self._filled() if len(each.ids) <= space]:
            best = max(fitting, key=lambda each: len(each.ids)) if chosen else fitting[0]
            self.waiting = [each for each in self.waiting if each is not best]
            chosen.append(best)
            space -= len(best.ids)
        if not chosen:
            if self._end is not None:
                raise self._end
            return None
        return self._packed(chosen)

    def _filled(self) -> list[Encoded]:
        while len(self.waiting) < self._WAITING and not self._has_ended:
            try:
                document = self._next_document()
            except RunError as error:
                self._end, document = error, None
            if document is None:
                self._has_ended = True
            else:
                self.waiting.append(document)
        return self.waiting

    def _packed(self, chosen: list[Encoded]) -> PackedSequence:
        ids = np.concatenate([each.ids for each in chosen])
        labels = np.full(self._seq_len, IGNORE_INDEX, np.int64)
        documents = np.full(self._seq_len, len(chosen), np.int32)
        at = 0
        for number, document in enumerate(chosen):
            end = at + len(document.ids)
            documents[at:end] = number
            targets = document.ids[1:]
            if document.is_target is not None:
                targets = np.where(document.is_target[1:], targets, IGNORE_INDEX)
            labels[at : end - 1] = targets
            at = end
        return PackedSequence(
            np.concatenate([ids, np.resize(ids, self._seq_len - at)]),
            labels,
            documents,
            [each.name for each in chosen],
        )


def ignored_sequence(like: PackedSequence) -> PackedSequence:
    """A sequence without any target, to fill up a batch: another's tokens, since padding alone
    would send all tokens to the same experts, which do not fit into bounded buffers."""
    return replace(like, labels_S=np.full_like(like.labels_S, IGNORE_INDEX), samples=[])
