"""The validation set: the same finite list of batches at every measurement."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice

from titan_moe.data.bad_documents import BadDocuments, counted, refusal
from titan_moe.data.batch import Batch, stack_sequences, to_tensors
from titan_moe.data.documents import OutOfDocumentsError
from titan_moe.data.packing import Encoded, PackedSequence, Packer, ignored_sequence
from titan_moe.data.sequences import Blend, BlendSource, encode_document
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.runtime.errors import RunError

logger = logging.getLogger(__name__)


class ValidationLoader:
    """Packs the documents into sequences, dealt to the data ranks batch by batch.

    The sequences do not depend on the number of data ranks; ignored ones fill up the last batch, so
    that every rank has as many. Each document is tokenized once, by one of the ranks that
    `gather` joins, and sent to all. A rank keeps its own sequences, at 20 bytes a token.
    """

    def __init__(
        self,
        parts: Sequence[BlendSource],
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        mask_documents: bool,
        local_batch_size: int,
        max_bad_documents: float,
        steps: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        """`steps`: at most so many batches of sequences, whatever the number of ranks; -1: all."""
        self.parts = parts
        self._tokenizer = tokenizer
        self._local_batch_size = local_batch_size
        self._rank = rank
        self._num_ranks = num_ranks
        self._blend = Blend([part.weight for part in parts])
        self.gather = lambda encode, *turn: [list(encode(*turn, 0))]
        """Calls `encode(*turn, rank)` on each rank; returns all ranks' documents."""
        self._documents = [self._read_part(part) for part in range(len(parts))]
        self._read = [0] * len(parts)
        self._bad = [BadDocuments()] * len(parts)
        self._max_bad_documents = max_bad_documents
        self._unread = list(range(len(parts)))
        packer = Packer(
            self._next_document,
            seq_len=seq_len,
            mask_documents=mask_documents,
            padding_id=tokenizer.eos_id,
        )
        most = steps * local_batch_size if steps >= 0 else None
        self._sequences = islice(iter(packer.next_sequence, None), most)
        self._filler: PackedSequence | None = None
        self._batches: list[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._batches is None:
            self._batches = self._read_batches()
        return iter(self._batches)

    def _read_batches(self) -> list[Batch]:
        batches: list[Batch] = []
        while True:
            own, found = self._next_sequences()
            if not found:
                self._report_bad_documents()
                return batches
            batches.append(to_tensors(stack_sequences(own)))

    def _report_bad_documents(self) -> None:
        """Raises RunError where there are too many."""
        for part, bad, seen in zip(self.parts, self._bad, self._read, strict=True):
            order, most = part.order, self._max_bad_documents
            if line := refusal(order.name, bad, seen=seen, size=seen, most=most):
                raise RunError(f"validation: {line}")
            if bad.number:
                logger.warning("validation: %s: %s", order.name, counted(bad))

    def _next_sequences(self) -> tuple[list[PackedSequence], bool]:
        """This rank's sequences of the next batch, and whether any rank's hold a document."""
        own: list[PackedSequence] = []
        found = False
        first = self._rank * self._local_batch_size
        for number in range(self._num_ranks * self._local_batch_size):
            packed = next(self._sequences, None)
            found = found or packed is not None
            self._filler = self._filler or packed  # The last one may be mostly padding.
            if found and first <= number < first + self._local_batch_size:
                assert self._filler is not None
                own.append(packed or ignored_sequence(self._filler))
        return own, found

    def _next_document(self) -> Encoded | None:
        while self._unread:
            part = self._blend.next_part(self._unread)
            if encoded := next(self._documents[part], None):
                self._read[part] += 1
                self._blend.tokens[part] += len(encoded.ids)
                if encoded.problem:
                    self._bad[part] += BadDocuments(1, f"{encoded.name} {encoded.problem}")
                return encoded
            self._unread.remove(part)
        return None

    def _read_part(self, part: int) -> Iterator[Encoded]:
        """All documents of a part, in turns: each rank encodes a range of up to 32."""
        first, most = 0, 1
        while True:
            ranges = self.gather(self._encode, part, first, most)
            yield from chain(*ranges)
            if len(ranges[-1]) < most:
                return
            first, most = first + len(ranges) * most, min(2 * most, 32)

    def _encode(self, part: int, first: int, most: int, rank: int) -> Iterator[Encoded]:
        """Up to `most` documents, from position `first` + `rank` * `most` on."""
        order = self.parts[part].order
        with suppress(OutOfDocumentsError):
            for position in range(first + rank * most, first + (rank + 1) * most):
                yield encode_document(order.document(position), self._tokenizer)
