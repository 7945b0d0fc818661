"""Builds readers from the configuration's tables. Imports no torch: checks before a run use it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training, Validation
from titan_moe.data.corpus import Source
from titan_moe.data.loader import StepReader
from titan_moe.data.order import Corpus, CorpusOrder, Split
from titan_moe.data.packed_conversations import ConversationSequences, Lengths, check_first, measure
from titan_moe.data.sequences import BlendSource, Identity, TextSequences
from titan_moe.data.sources import (
    endless_validation,
    open_source,
    shared_places,
    training_sources,
    validation_sources,
)
from titan_moe.data.stream import DocumentOrder, StreamOrder
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.data.validation import ValidationLoader


def build_reader(
    training: Training,
    tokenizer: Tokenizer,
    *,
    seed: int,
    rank: int = 0,
    num_ranks: int = 1,
    permutation: int = 0,
    validation: Validation | None = None,
    lengths: Sequence[np.ndarray] | None = None,
) -> StepReader:
    """Returns the reader of data rank `rank` of `num_ranks`. It reads a contiguous range of the
    global batch's sequences, or of the order that the seed `permutation` gives them. Leaves out the
    documents that `validation` holds out. lengths: as `ConversationSequences` takes them.
    `training` has a global_batch_size.

    ConfigError when a source is missing, unreadable or has fewer documents than sequences.
    """
    size = training.global_batch_size
    order = np.arange(size)
    if permutation:
        order = np.random.default_rng(permutation).permutation(size)
    sequences = order[: size // num_ranks * num_ranks].reshape(num_ranks, -1)[rank].tolist()
    # There is enough of the made-up language: it has one order in all runs.
    shared, every = {("synthetic", os.path.realpath(""))}, Validation().held_out_every
    if validation is not None and validation.enable:
        shared |= shared_places(validation, training)
        every = validation.held_out_every
    sources, names = [], []
    for source in training_sources(training):
        split = Split(every) if source.place in shared else Split()
        opened = _open_order(
            source,
            tokenizer,
            split,
            seed=seed,
            shuffle=True,
            sequences=sequences,
            global_batch_size=size,
            epochs=training.epochs or (None if training.repeat_dataset else 1),
        )
        if tokenizer.conversations is None:
            _check_size(opened, size, repeat=training.repeat_dataset)
        sources.append(BlendSource(opened, source.weight))
        names.append(f"{source.weight:g} x {opened.fingerprint}{_split_mark(split)}")
    identity = Identity(
        fingerprint=" + ".join(names),
        **tokenizer.identity(),
        seed=seed,
        global_batch_size=size,
        seq_len=training.seq_len,
        checksum="+".join(source.order.checksum() or "-" for source in sources),
    )
    read: TextSequences | ConversationSequences
    if tokenizer.conversations is None:
        read = TextSequences(sources, tokenizer, identity, sequences, training.mask_documents)
    else:
        read = ConversationSequences(sources, tokenizer, identity, sequences, lengths)
    return StepReader(read, training.local_batch_size)


def measure_conversations(
    training: Training, tokenizer: Tokenizer, *, seed: int, part: int, parts: int
) -> list[Lengths]:
    """Returns the lengths of one part of each source's conversations. Raises ConfigError as
    `build_reader` does."""
    found = []
    for source in training_sources(training):
        corpus = open_source(source, tokenizer, seed)
        assert isinstance(corpus, Corpus)
        name, indices = source.name, range(part, len(corpus), parts)
        found.append(measure(corpus, tokenizer, training.seq_len, name=name, indices=indices))
    return found


def build_validation(
    validation: Validation,
    training: Training,
    tokenizer: Tokenizer,
    *,
    seed: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> ValidationLoader:
    """Returns the validation set of data rank `rank`: `validation.dataset`, or what training holds
    out.

    ConfigError when a source is missing, unreadable or without documents, or would never end.
    """
    if endless := endless_validation(validation, training):
        raise ConfigError(endless)
    shared = shared_places(validation, training)
    sources = []
    for source in validation_sources(validation, training):
        is_shared = source.place in shared
        split = Split(validation.held_out_every, held_out=True) if is_shared else Split()
        order = _open_order(source, tokenizer, split, seed=seed)
        if order.size == 0:
            raise ConfigError(
                f"{order.name} has too few documents to hold one "
                "out: name a validation.dataset, or set validation.enable=false"
            )
        sources.append(BlendSource(order, source.weight))
    return ValidationLoader(sources, tokenizer, validation, training, rank, num_ranks)


def _split_mark(split: Split) -> str:
    """Returns the suffix of a fingerprint for other documents than the default's."""
    marks = {0: ":whole", Validation().held_out_every: ""}
    return marks.get(split.every, f":validation.held_out_every={split.every}")


def _open_order(
    source: Source,
    tokenizer: Tokenizer,
    split: Split,
    *,
    seed: int,
    shuffle: bool = False,
    sequences: Sequence[int] = (0,),
    global_batch_size: int = 1,
    epochs: int | None = 1,
) -> DocumentOrder:
    """Open a source for training, or by default as it is for validation."""
    opened = open_source(source, tokenizer, seed)
    if isinstance(opened, Corpus):
        if tokenizer.conversations is not None:
            check_first(opened, tokenizer, source.name)
        seed_or_none = seed if shuffle else None
        return CorpusOrder(source.name, opened, split=split, seed=seed_or_none, epochs=epochs)
    repeat = epochs is None
    return StreamOrder(source.name, opened, split, sequences, global_batch_size, repeat)


def _check_size(order: DocumentOrder, global_batch_size: int, *, repeat: bool) -> None:
    """Raises ConfigError for a source with fewer documents than sequences: each needs one to be
    filled."""
    if order.size is None or order.size >= (1 if repeat else global_batch_size):
        return
    raise ConfigError(
        f"{order.name} has {order.size:,} documents to train on, fewer "
        f"than the {global_batch_size:,} sequences of training.global_batch_size: add "
        "documents, choose a smaller global_batch_size, or set training.repeat_dataset=true"
    )
