"""What one sequence of the global batch reads, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_moe.data.bad_documents import BadDocuments, as_json, from_json
from titan_moe.data.document_order import Assignment, DocumentOrder
from titan_moe.data.documents import Document, OutOfDocumentsError, mix
from titan_moe.data.packing import Encoded, PackedSequence, Packer
from titan_moe.data.position import damaged
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.runtime.errors import RunError


@dataclass(frozen=True)
class BlendSource:
    """The documents of one source and their share of the tokens, relative to the other weights."""

    order: DocumentOrder
    weight: float


def encode_document(document: Document, tokenizer: Tokenizer) -> Encoded:
    """Token ids of a document, with the EOS that ends it."""
    content = document.content
    ids = tokenizer.encode(content) if isinstance(content, str) else content
    ids = np.append(ids.astype(np.int64), tokenizer.eos_id)
    return Encoded(document.name, ids, document.problem)


class Blend:
    """Chooses the part that the next document comes from: the one furthest behind its share.

    A function of the lengths so far alone, so a sequence's choice needs no other sequence.
    Sequences start with different parts, by the seed.
    """

    def __init__(self, weights: Sequence[float], *, key: tuple[int, ...] = ()) -> None:
        self._weights = weights
        self._ties = [mix(*key, part) for part in range(len(weights))]
        self.tokens = [0] * len(weights)
        """Tokens taken so far, by part."""

    def next_part(self, parts: Sequence[int] | None = None) -> int:
        """The number of the part to take from, among `parts` (default: all)."""
        return min(
            range(len(self._weights)) if parts is None else parts,
            key=lambda part: (self.tokens[part] / self._weights[part], self._ties[part]),
        )


class SequenceStream:
    """A sequence of the global batch: packs the documents of each part that are assigned to it."""

    def __init__(
        self,
        index: int,
        *,
        parts: Sequence[BlendSource],
        tokenizer: Tokenizer,
        seed: int,
        global_batch_size: int,
        seq_len: int,
        mask_documents: bool,
    ) -> None:
        self.index = index
        self._parts = parts
        self._tokenizer = tokenizer
        self._global_batch_size = global_batch_size
        self._blend = Blend([part.weight for part in parts], key=(seed, index))
        # Where the sequences begin, by part and partition.
        self._first: Sequence[Sequence[int]] = [[0] * part.order.num_partitions for part in parts]
        self._read = [0] * len(parts)  # Documents opened, by part.
        self.bad = [BadDocuments()] * len(parts)
        """Of the documents opened, by part."""
        self._part = -1  # Where the open document comes from; -1: none is open yet.
        self._packer = Packer(
            self._next_document,
            seq_len=seq_len,
            mask_documents=mask_documents,
            padding_id=tokenizer.eos_id,
        )

    def next_sequence(self) -> PackedSequence:
        """The next seq_len tokens; RunError when a part has no document left."""
        packed = self._packer.next_sequence()
        assert packed is not None
        return packed

    def num_opened(self, part: int) -> int:
        """Documents of `part` that were opened."""
        return self._read[part]

    def oldest(self, part: int) -> dict[int, int]:
        """First position, by partition of `part`, that a resume from `state()` asks for."""
        turns = len(self._assignment(part).partitions(self.index))
        next_number = self._read[part] - (part == self._part)
        return dict(self._place(part, next_number + turn) for turn in range(turns))

    def state(self) -> dict[str, Any]:
        """JSON-able place in the stream: documents and tokens opened by part; the open document,
        and its tokens before and after the place."""
        state = {
            "read": list(self._read),
            "tokens": list(self._blend.tokens),
            "part": self._part,
            "offset": self._packer.offset,
            "unread": self._packer.unread,
        }
        if bad := as_json(self.bad):
            state["bad"] = bad
        return state

    def load_state(self, state: dict[str, Any], first: Sequence[Sequence[int]]) -> None:
        """Go on where `state` was taken, of sequences that begin at the positions `first`."""
        self._first = first
        self._read = list(state["read"])
        self._blend.tokens = list(state["tokens"])
        self._part = state["part"]
        self.bad = from_json(state.get("bad", []), len(self._parts))
        document = None
        if self._part >= 0:
            document = self._open(self._part, self._read[self._part] - 1)
        if state["offset"] > (0 if document is None else len(document.ids)):
            raise damaged(
                f"rows.{self.index}.offset: the document has no {state['offset']:,} tokens"
            )
        self._packer.resume(document, state["offset"])

    def _assignment(self, part: int) -> Assignment:
        return Assignment(self._global_batch_size, self._parts[part].order.num_partitions)

    def _place(self, part: int, number: int) -> tuple[int, int]:
        """Partition and position of this sequence's document `number` of `part`."""
        partition, offset = self._assignment(part).place(self.index, number)
        return partition, self._first[part][partition] + offset

    def _open(self, part: int, number: int) -> Encoded:
        partition, position = self._place(part, number)
        document = self._parts[part].order.document(position, partition)
        return encode_document(document, self._tokenizer)

    def _next_document(self) -> Encoded:
        part = self._blend.next_part()
        order = self._parts[part].order
        try:
            encoded = self._open(part, self._read[part])
        except OutOfDocumentsError:
            of = "" if order.size is None else f" of the {order.size:,} documents of an epoch"
            raise RunError(
                f"{order.name} ran out: sequence {self.index} of the global batch of "
                f"{self._global_batch_size} has used up its {self._read[part]:,}{of} and "
                f"{self._blend.tokens[part]:,} tokens; set training.repeat_dataset=true to start "
                "it again, or train fewer steps"
            ) from None
        self._part = part
        self._read[part] += 1
        self._blend.tokens[part] += len(encoded.ids)
        if encoded.problem:
            self.bad[part] += BadDocuments(1, f"{encoded.name} {encoded.problem}")
        return encoded
