"""Conversations packed whole into the sequences of a run, in one order for all ranks.

Every rank knows the tokens of every conversation, and so which of them each sequence of the global
batch holds; it reads those of its own sequences. An epoch is each conversation once.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from titan_moe.config.errors import ConfigError
from titan_moe.data.batch import BestFit, PackedSequence, ignored_sequence, whole_documents
from titan_moe.data.conversations import ChatError, LeftOutError
from titan_moe.data.order import Corpus, CorpusOrder, OutOfDocumentsError
from titan_moe.data.sequences import Blend, BlendSource, Identity, encode_document
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.runtime.errors import RunError

logger = logging.getLogger(__name__)

_UNKNOWN = -1
MOST_SAMPLED = 64  # Documents of a source that a check reads.
_MOST_KINDS = 4  # Kinds of problems that a line names.


@dataclass
class Lengths:
    """The tokens of a corpus's conversations in a sequence, and what is not read of them."""

    tokens: np.ndarray
    """int32 [documents]; 0 for a conversation that is refused or left out: nothing in it is to be
    learned, or it is too long."""
    problems: Counter[tuple[bool, str]] = field(default_factory=Counter)
    """Numbers of conversations that are refused (True) or left out, by kind: the reasons alike but
    for their numbers."""
    first: dict[tuple[bool, str], str] = field(default_factory=dict)
    """A line about the first conversation of each kind."""
    num_cut: int = 0
    """Conversations that lose their ends."""
    cut_tokens: int = 0

    def __add__(self, other: Lengths) -> Lengths:
        """Joins the lengths and problems of two parts of one corpus."""
        return Lengths(
            self.tokens + other.tokens,
            self.problems + other.problems,
            other.first | self.first,
            self.num_cut + other.num_cut,
            self.cut_tokens + other.cut_tokens,
        )

    def lines(self, name: str, num_read: int, max_refused: float) -> list[str]:
        """Returns what is to be known of a source's conversations that are not read whole.
        ConfigError if more of those read are refused than `max_refused` of them."""
        found = []
        for is_refused, verb in ((True, "refused"), (False, "left out")):
            kinds = [each for each in self.problems.most_common() if each[0][0] == is_refused]
            count = sum(number for _, number in kinds)
            examples = [f"{self.first[kind]} ({n:,} so)" for kind, n in kinds[:_MOST_KINDS]]
            more = [f"{len(kinds) - _MOST_KINDS} reasons more"] * (len(kinds) > _MOST_KINDS)
            line = f"{name}: {count:,} of {num_read:,} conversations are {verb}: "
            line += "; ".join(examples + more)
            if is_refused and count > max_refused * num_read:
                limit = f"more than training.messages.max_refused={max_refused:g} of them"
                raise ConfigError(f"{line}: {limit}: mend them, take them out, or raise it")
            found += [line] * bool(count)
        if self.num_cut:
            found.append(
                f"{name}: {self.num_cut:,} of {num_read:,} conversations lose their ends, "
                f"{self.cut_tokens:,} tokens behind training.seq_len: see training.messages."
                "too_long"
            )
        return found


def measure(
    corpus: Corpus, tokenizer: Tokenizer, seq_len: int | None, *, name: str, indices: range
) -> Lengths:
    """Tokenize the conversations `indices` of a corpus. The lengths of the others are 0, so that
    those of all parts add up. Logs how far it is every ten seconds."""
    found = Lengths(np.zeros(len(corpus), np.int32))
    said = time.monotonic()
    for index in indices:
        document = corpus[index]
        try:
            encoded = encode_document(document, tokenizer, seq_len)
        except ChatError as error:
            kind = not isinstance(error, LeftOutError), re.sub(r"\d[\d,]*", "N", str(error))
            found.problems[kind] += 1
            found.first.setdefault(kind, f"{document.name}: {error}")
        else:
            found.tokens[index] = len(encoded.ids)
            found.num_cut += bool(encoded.cut)
            found.cut_tokens += encoded.cut
        if time.monotonic() - said > 10:
            said = time.monotonic()
            logger.info("%s: %d of %d conversations are tokenized", name, index, len(corpus))
    return found


def check_first(corpus: Corpus, tokenizer: Tokenizer, name: str) -> None:
    """Raises ConfigError for a source of whose first conversations too many are refused, or none
    has anything to learn."""
    assert tokenizer.conversations is not None
    first = range(min(len(corpus), MOST_SAMPLED))
    found = measure(corpus, tokenizer, None, name=name, indices=first)
    found.lines(name, len(first), tokenizer.conversations.max_refused)
    if not found.tokens.any():
        raise ConfigError(
            f"{name}: no message of its first {MOST_SAMPLED} conversations is to be "
            "learned: choose other training.messages.targets, or mend the roles"
        )


class _Place(NamedTuple):
    """The place of a conversation: its source, and its position in the source's order."""

    source: int
    position: int
    tokens: int


@dataclass
class ConversationSequences:
    """The sequences of one data rank, of conversations that are packed for all ranks alike."""

    sources: Sequence[BlendSource]
    tokenizer: Tokenizer
    identity: Identity
    own: Collection[int]
    """This rank's sequences of the global batch."""
    lengths: Sequence[np.ndarray] | None = None
    """`Lengths.tokens` of each source; None: a conversation is measured when its turn comes."""

    def __post_init__(self) -> None:
        self._orders = [cast(CorpusOrder, source.order) for source in self.sources]
        self._lengths = self.lengths or [
            np.full(len(order.corpus), _UNKNOWN, np.int32) for order in self._orders
        ]
        self._begin()

    def _begin(self) -> None:
        weights = [source.weight for source in self.sources]
        self._blend = Blend(weights, key=(self.identity.seed,))
        self._read = [0] * len(weights)
        self._best_fit = BestFit(
            self._next_place,
            size=lambda place: place.tokens,
            capacity=self.identity.seq_len,
        )

    def count(self) -> int:
        """The number of sequences from here to the end of the data, which they must have."""
        state = self.state()
        number = sum(1 for _ in iter(self._best_fit.next_group, []))
        self.load_state(state)
        return number

    def next_batch(self) -> list[PackedSequence]:
        """Returns this rank's sequences of the next step. At the end of the data, sequences without
        a target fill up the last batch; RunError after that."""
        size = self.identity.global_batch_size
        groups = [self._best_fit.next_group() for _ in range(size)]
        if not groups[0]:
            ended = self._orders[self._blend.next_source()]
            raise RunError(
                f"{ended.name} ran out: its {ended.size:,} conversations have been read as often "
                "as asked for; set training.repeat_dataset=true or more training.epochs, or train "
                "fewer steps"
            )
        return [
            self._packed(groups[number])
            if groups[number]
            else ignored_sequence(self._packed(groups[0]))
            for number in self.own
        ]

    def state(self) -> dict[str, Any]:
        """JSON-able: by source the conversations taken and their tokens, and the places of those
        that wait for a sequence. The same on every rank."""
        waiting = [[place.source, place.position] for place in self._best_fit.waiting]
        return {"read": list(self._read), "tokens": list(self._blend.tokens), "waiting": waiting}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, of any number of ranks, sequence length and batch."""
        self._begin()
        self._read, self._blend.tokens = list(state["read"]), list(state["tokens"])
        # With fewer training.epochs the data end before some.
        places = filter(None, (self._place(*where) for where in state["waiting"]))
        # In a training stage of shorter sequences nothing may be left of one.
        self._best_fit.waiting = [place for place in places if place.tokens]

    def _packed(self, places: Sequence[_Place]) -> PackedSequence:
        documents = [self._orders[place.source].document(place.position) for place in places]
        seq_len = self.identity.seq_len
        encoded = [encode_document(each, self.tokenizer, seq_len) for each in documents]
        return whole_documents(encoded, seq_len)

    def _place(self, source: int, position: int) -> _Place | None:
        """Returns a conversation's place; None beyond the end of the data."""
        order, lengths = self._orders[source], self._lengths[source]
        try:
            index = order.index(position)
        except OutOfDocumentsError:
            return None
        if lengths[index] == _UNKNOWN:
            lengths[index] = self._measure(order, index).tokens[index]
        return _Place(source, position, int(lengths[index]))

    def _next_place(self) -> _Place | None:
        """The next conversation that is not left out; None at the end of the data."""
        source = self._blend.next_source()
        order = self._orders[source]
        for _ in range(2 * order.size):  # At least one whole epoch.
            if (place := self._place(source, self._read[source])) is None:
                if self._blend.tokens[source]:
                    return None
                break
            self._read[source] += 1
            if place.tokens:
                self._blend.tokens[source] += place.tokens
                return place
        (first,) = self._measure(order, order.index(0)).first.values()
        raise RunError(
            f"{order.name}: all {order.size:,} conversations are left out, such as {first}: mend "
            "the data"
        )

    def _measure(self, order: CorpusOrder, index: int) -> Lengths:
        one, seq_len = range(index, index + 1), self.identity.seq_len
        return measure(order.corpus, self.tokenizer, seq_len, name=order.name, indices=one)
