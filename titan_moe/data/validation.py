"""The validation set: the same finite list of batches at every measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, count, islice, repeat

from titan_moe.config.job_config import Training, Validation
from titan_moe.data.batch import (
    Batch,
    BestFit,
    Encoded,
    PackedSequence,
    Packer,
    ignored_sequence,
    stack_sequences,
    whole_documents,
)
from titan_moe.data.order import OutOfDocumentsError
from titan_moe.data.sequences import Blend, BlendSource, read_document
from titan_moe.data.tokenizer import Tokenizer


class ValidationLoader:
    """Packs the documents into sequences, dealt to the data ranks batch by batch.

    The sequences do not depend on the number of data ranks; ignored ones fill up the last batch, so
    that every rank has as many. Every rank reads all documents, once, and keeps the sequences of
    its batches, at 20 bytes a token.
    """

    def __init__(
        self,
        sources: Sequence[BlendSource],
        tokenizer: Tokenizer,
        *,
        validation: Validation,
        training: Training,
        rank: int,
        num_ranks: int,
    ) -> None:
        self.sources = sources
        self._tokenizer = tokenizer
        self._local_batch_size = validation.local_batch_size
        self._rank = rank
        self._num_ranks = num_ranks
        self._blend = Blend([source.weight for source in sources])
        self._seq_len = validation.seq_len or training.seq_len
        self._documents = [self._read_source(source) for source in range(len(sources))]
        self._unread = list(range(len(sources)))
        sequences: Iterator[PackedSequence]
        if tokenizer.conversations is not None:
            best_fit = BestFit(
                self._next_document, size=lambda each: len(each.ids), capacity=self._seq_len
            )
            groups = iter(best_fit.next_group, [])
            sequences = (whole_documents(group, self._seq_len) for group in groups)
        else:
            packer = Packer(
                self._next_document,
                seq_len=self._seq_len,
                mask_documents=training.mask_documents,
                padding_id=tokenizer.eos_id,
            )
            sequences = iter(packer.next_sequence, None)
        # Whatever the number of ranks; -1: all.
        steps = validation.steps
        most = steps * self._local_batch_size if steps >= 0 else None
        self._sequences = islice(sequences, most)
        self._batches: list[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._batches is None:
            self._batches = list(self._read_batches())
        return iter(self._batches)

    def _read_batches(self) -> Iterator[Batch]:
        """Yields this rank's sequences of each batch of all ranks."""
        size = self._num_ranks * self._local_batch_size
        first = self._rank * self._local_batch_size
        filler: PackedSequence | None = None
        for opening in self._sequences:
            filler = filler or ignored_sequence(opening)  # The last one may be mostly padding.
            batch = chain([opening], islice(self._sequences, size - 1), repeat(filler))
            # All are read, and only this rank's kept.
            numbered = zip(range(size), batch, strict=False)
            own = range(first, first + self._local_batch_size)
            yield stack_sequences([sequence for number, sequence in numbered if number in own])

    def _next_document(self) -> Encoded | None:
        while self._unread:
            source = self._blend.next_source(self._unread)
            if encoded := next(self._documents[source], None):
                self._blend.tokens[source] += len(encoded.ids)
                return encoded
            self._unread.remove(source)
        return None

    def _read_source(self, source: int) -> Iterator[Encoded]:
        """Yields all documents of a source."""
        order = self.sources[source].order
        with suppress(OutOfDocumentsError):
            for position in count():
                document = order.document(position)
                if encoded := read_document(document, self._tokenizer, self._seq_len):
                    yield encoded
