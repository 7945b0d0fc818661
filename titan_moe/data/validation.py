"""The validation set: the same finite list of batches at every measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
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
from titan_moe.data.stream import DocumentOrder
from titan_moe.data.tokenizer import Tokenizer


@dataclass
class ValidationLoader:
    """Packs the documents into sequences, dealt to the data ranks batch by batch.

    The sequences do not depend on the number of data ranks; ignored ones fill up the last batch, so
    that every rank has as many. Every rank reads all documents, once, and keeps the sequences of
    its batches, at 20 bytes a token.
    """

    sources: Sequence[BlendSource]
    tokenizer: Tokenizer
    validation: Validation
    training: Training
    rank: int
    num_ranks: int

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    @cached_property
    def _batches(self) -> list[Batch]:
        """This rank's sequences of each batch of all ranks."""
        local, steps = self.validation.local_batch_size, self.validation.steps
        size, own = self.num_ranks * local, range(self.rank * local, (self.rank + 1) * local)
        # Whatever the number of ranks; -1: all.
        sequences = islice(self._sequences(), steps * local if steps >= 0 else None)
        batches: list[Batch] = []
        filler: PackedSequence | None = None
        for opening in sequences:
            filler = filler or ignored_sequence(opening)  # The last one may be mostly padding.
            batch = chain([opening], islice(sequences, size - 1), repeat(filler))
            # All are read, and only this rank's kept.
            numbered = zip(range(size), batch, strict=False)
            kept = [sequence for number, sequence in numbered if number in own]
            batches.append(stack_sequences(kept))
        return batches

    def _sequences(self) -> Iterator[PackedSequence]:
        """Returns all sequences of the blend, each of whose sources is read once."""
        sources, tokenizer, training = self.sources, self.tokenizer, self.training
        seq_len = self.validation.seq_len or training.seq_len
        blend, unread = Blend([source.weight for source in sources]), [*range(len(sources))]
        documents = [_documents(source.order, tokenizer, seq_len) for source in sources]

        def next_document() -> Encoded | None:
            while unread:
                source = blend.next_source(unread)
                if encoded := next(documents[source], None):
                    blend.tokens[source] += len(encoded.ids)
                    return encoded
                unread.remove(source)
            return None

        if tokenizer.conversations is not None:
            best_fit = BestFit(next_document, size=lambda each: len(each.ids), capacity=seq_len)
            return (whole_documents(group, seq_len) for group in iter(best_fit.next_group, []))
        packer = Packer(next_document, seq_len, training.mask_documents, tokenizer.eos_id)
        return iter(packer.next_sequence, None)


def _documents(order: DocumentOrder, tokenizer: Tokenizer, seq_len: int) -> Iterator[Encoded]:
    """Yields all documents of a source."""
    with suppress(OutOfDocumentsError):
        for position in count():
            if encoded := read_document(order.document(position), tokenizer, seq_len):
                yield encoded
