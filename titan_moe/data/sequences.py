"""The documents and tokens that one sequence of the global batch reads, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_moe.data.batch import Encoded, PackedSequence, Packer
from titan_moe.data.conversations import ChatError, LeftOutError
from titan_moe.data.order import Assignment, Document, OutOfDocumentsError, mix
from titan_moe.data.stream import DocumentOrder
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.runtime.errors import RunError


@dataclass(frozen=True)
class Identity:
    """Everything that determines the token stream. A data position is valid under it alone."""

    fingerprint: str
    """Sources and weights."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    tokenizer_path: str
    """Names the tokenizer in messages; another path may lead to the same one."""
    append_eos: str | bool
    prepend_bos: bool
    parse_special_tokens: bool
    seed: int
    global_batch_size: int
    seq_len: int
    checksum: str
    """Sampled checksums of the sources' files, joined by `+`. A source whose fingerprint covers its
    content contributes `-`."""
    messages: str = ""
    """Names all that conversations' tokens depend on; empty for texts."""


@dataclass(frozen=True)
class BlendSource:
    """The documents of one source and their share of the tokens, relative to the other weights."""

    order: DocumentOrder
    weight: float


def encode_document(
    document: Document, tokenizer: Tokenizer, seq_len: int | None = None
) -> Encoded:
    """Token ids of a document, with those that begin and end it. One without a text has no other
    ids. seq_len: the most tokens of a conversation; None: all.

    RunError if the document holds ids that the tokenizer has not, ChatError for a conversation that
    is none, that the chat template refuses, or in which nothing is to be learned.
    """
    content = "" if document.content is None else document.content
    if tokenizer.conversations is not None:
        assert isinstance(content, str)
        encoded = tokenizer.conversations.encode(document.name, content, seq_len)
        if encoded.is_target is not None and encoded.is_target.any():
            return encoded
        within = "" if seq_len is None else f" in its first {seq_len:,} tokens"
        raise LeftOutError(f"no message is to be learned{within}")
    ids = tokenizer.encode(content) if isinstance(content, str) else content
    if not isinstance(content, str) and ids.size:
        if not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise RunError(
                f"document {document.name} holds tokens {ids.min()} to {ids.max()}, but the "
                f"tokenizer has 0 to {tokenizer.vocab_size - 1}: set model.tokenizer_path to the "
                "one that made them"
            )
        # Megatron-LM's tokenizers add BOS as the folder says, and --append-eod EOS.
        begin = int(tokenizer.prepend_bos and ids[0] == tokenizer.bos_id)
        ended = tokenizer.append_eos and ids[-1] == tokenizer.eos_id
        ids = ids[begin : len(ids) - bool(ended)]
    return Encoded(document.name, tokenizer.document(ids))


def read_document(
    document: Document, tokenizer: Tokenizer, seq_len: int | None = None
) -> Encoded | None:
    """A document's tokens; None for a conversation that is left out."""
    try:
        return encode_document(document, tokenizer, seq_len)
    except ChatError:
        return None


class Blend:
    """Chooses the source that the next document comes from: the one furthest behind its share.

    A function of the lengths so far alone, so a sequence's choice needs no other sequence.
    Sequences start with different sources, by the seed.
    """

    def __init__(self, weights: Sequence[float], *, key: tuple[int, ...] = ()) -> None:
        self._weights = weights
        self._ties = [mix(*key, source) for source in range(len(weights))]
        self.tokens = [0] * len(weights)
        """Tokens taken so far, by source."""

    def next_source(self, among: Sequence[int] | None = None) -> int:
        """The number of the source to take from, in `among` (default: all)."""
        return min(
            range(len(self._weights)) if among is None else among,
            key=lambda source: (self.tokens[source] / self._weights[source], self._ties[source]),
        )


class SequenceStream:
    """A sequence of the global batch: packs the documents of each source assigned to it."""

    def __init__(self, index: int, rank: TextSequences) -> None:
        """rank: the sequences of this one's rank, which have the sources in common."""
        self.index, self._rank = index, rank
        weights = [source.weight for source in rank.sources]
        self._blend = Blend(weights, key=(rank.identity.seed, index))
        self._read = [0] * len(rank.sources)  # Documents opened, by source.
        self._without_text, self._first_without = 0, ""
        self._source = -1  # The source of the document that is cut; -1: none is.
        self._packer = Packer(
            self._next_document,
            seq_len=rank.identity.seq_len,
            mask_documents=rank.mask_documents,
            padding_id=rank.tokenizer.eos_id,
        )

    def next_sequence(self) -> PackedSequence:
        """The next seq_len tokens; RunError when a source has no document left."""
        packed = self._packer.next_sequence()
        assert packed is not None
        return packed

    def oldest(self, source: int) -> dict[int, int]:
        """The first position, by partition of `source`, that a resume from `state()` asks for."""
        turns = len(self._assignment(source).partitions(self.index))
        next_number = self._read[source] - (source == self._source)
        return dict(self._place(source, next_number + turn) for turn in range(turns))

    def state(self) -> dict[str, Any]:
        """Returns the JSON-able place in the stream.

        By source the documents read and their tokens; in "part" the source of the open document,
        and in "offset" its tokens before the place; documents without a text, and the first one.
        """
        return {
            "read": list(self._read),
            "tokens": list(self._blend.tokens),
            "part": self._source,
            "offset": self._packer.offset,
            "without_text": self._without_text,
            "first_without": self._first_without,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._read = list(state["read"])
        self._blend.tokens = list(state["tokens"])
        self._source = state["part"]
        self._without_text = state["without_text"]
        self._first_without = state.get("first_without", "")
        document = None
        if self._source >= 0:
            opened_last = self._open(self._source, self._read[self._source] - 1)
            document = encode_document(opened_last, self._rank.tokenizer)
        self._packer.document, self._packer.offset = document, state["offset"]

    def _assignment(self, source: int) -> Assignment:
        partitions = self._rank.sources[source].order.num_partitions
        return Assignment(self._rank.identity.global_batch_size, partitions)

    def _place(self, source: int, number: int) -> tuple[int, int]:
        """Partition and position of this sequence's document `number` of `source`."""
        partition, offset = self._assignment(source).place(self.index, number)
        return partition, self._rank.first[source][partition] + offset

    def _open(self, source: int, number: int) -> Document:
        partition, position = self._place(source, number)
        return self._rank.sources[source].order.document(position, partition)

    def _next_document(self) -> Encoded:
        source = self._blend.next_source()
        order = self._rank.sources[source].order
        try:
            document = self._open(source, self._read[source])
        except OutOfDocumentsError:
            size = self._rank.identity.global_batch_size
            of = "" if order.size is None else f" of the {order.size:,} documents of an epoch"
            raise RunError(
                f"{order.name} ran out: sequence {self.index} of the global batch of {size} has "
                f"used up its {self._read[source]:,}{of} and {self._blend.tokens[source]:,} "
                "tokens; set training.repeat_dataset=true to start it again, or train fewer steps"
            ) from None
        self._read[source] += 1
        encoded = encode_document(document, self._rank.tokenizer)
        self._source = source
        self._blend.tokens[source] += len(encoded.ids)
        if document.content is None:
            self._without_text += 1
            self._first_without = self._first_without or document.name
        return encoded


@dataclass
class TextSequences:
    """The sequences of one data rank, each with documents of its own."""

    sources: Sequence[BlendSource]
    tokenizer: Tokenizer
    identity: Identity
    own: Sequence[int]
    """This rank's sequences of the global batch."""
    mask_documents: bool

    def __post_init__(self) -> None:
        self.first = [[0] * source.order.num_partitions for source in self.sources]
        """The position, by source and partition, from which on the sequences take documents: 0,
        until a training stage changes the batch size."""
        self._streams = [SequenceStream(index, self) for index in self.own]

    def next_batch(self) -> list[PackedSequence]:
        """This rank's sequences of the next step; RunError when a source has no document left."""
        return [stream.next_sequence() for stream in self._streams]

    def state(self) -> dict[str, Any]:
        """JSON-able: this rank's sequences by number, and the places where streams are read on."""
        return {
            "first": self.first,
            "rows": {str(stream.index): stream.state() for stream in self._streams},
            "marks": [
                source.order.mark(self._oldest(number))
                for number, source in enumerate(self.sources)
            ],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state`, merged over all ranks, was taken."""
        self.first = state["first"]
        for source, mark, first in zip(self.sources, state["marks"], self.first, strict=True):
            source.order.seek(mark, first)
        for stream in self._streams:
            stream.load_state(state["rows"][str(stream.index)])

    def _oldest(self, source: int) -> dict[int, int]:
        """The first position, by partition of `source`, that a resume asks for."""
        oldest: dict[int, int] = {}
        for stream in self._streams:
            for partition, position in stream.oldest(source).items():
                oldest[partition] = min(position, oldest.get(partition, position))
        return oldest
