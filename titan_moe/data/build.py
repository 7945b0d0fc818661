"""From the configuration's tables to loaders; without torch, for the checks before a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training, Validation
from titan_moe.data.bad_documents import refusal
from titan_moe.data.document_order import CorpusOrder, DocumentOrder, Split
from titan_moe.data.documents import Corpus
from titan_moe.data.loader import Loader
from titan_moe.data.sequences import BlendSource, SequenceStream
from titan_moe.data.sources import check_source, is_stream, open_source
from titan_moe.data.step_reader import Identity, StepReader
from titan_moe.data.stream_order import StreamOrder
from titan_moe.data.tokenizer import Tokenizer, load_tokenizer
from titan_moe.data.validation import ValidationLoader


@dataclass(frozen=True)
class _Named:
    """One source as the configuration names it; `key` is its table and a dot."""

    key: str
    dataset: str
    dataset_path: str | None
    text_column: str
    weight: float

    @property
    def name(self) -> str:
        return f"{self.key}dataset={self.dataset!r}"

    @property
    def place(self) -> tuple[str, str]:
        """The same for two names of one source."""
        return self.dataset, os.path.realpath(os.path.expanduser(self.dataset_path or ""))


def check_data(training: Training, validation: Validation, tokenizer_path: str) -> list[str]:
    """Everything wrong with data and tokenizer that can be found quickly, one line each."""
    lines: list[str] = []
    tokenizer = None
    try:
        tokenizer = load_tokenizer(tokenizer_path).fingerprint
    except ConfigError as error:
        lines += error.lines
    named = _training_sources(training)
    if validation.enable:
        lines += _endless_validation(validation, training)
        if validation.dataset is not None:
            named += _validation_sources(validation, training)
    for source in named:
        try:
            check_source(source.dataset, source.dataset_path, key=source.key, tokenizer=tokenizer)
        except ConfigError as error:
            lines += error.lines
    return lines


def build_loader(training: Training, tokenizer: Tokenizer, **place: Any) -> Loader:
    """A loader that reads in this process; `place`: the keywords of `build_reader`."""
    reader = build_reader(training, tokenizer, **place)
    return Loader(reader, prefetch_factor=training.dataloader.prefetch_factor)


def build_reader(
    training: Training,
    tokenizer: Tokenizer,
    *,
    seed: int,
    rank: int,
    num_ranks: int,
    global_batch_size: int,
    largest_batch_size: int = 0,
    permutation: int = 0,
    validation: Validation | None = None,
) -> StepReader:
    """The reader of data rank `rank` of `num_ranks`, which owns a contiguous range of the global
    batch's sequences: as they come, or in the order that the seed `permutation` gives them.
    `largest_batch_size`: that of any training stage. Leaves out what `validation` holds out.

    ConfigError when a source is missing, unreadable or has fewer documents than sequences.
    """
    sequences = _local_sequences(global_batch_size, rank, num_ranks, permutation)
    how: dict[str, Any] = {
        "shuffle": True,
        "seed": seed,
        "sequences": sequences,
        "global_batch_size": global_batch_size,
        "repeat": training.repeat_dataset,
        "max_bad_documents": training.max_bad_documents,
    }
    named = _training_splits(training, validation)
    parts = [
        BlendSource(_open_order(source, tokenizer, split=split, **how), source.weight)
        for source, split in named
    ]
    size = max(global_batch_size, largest_batch_size)
    for part in parts:
        _check_size(part.order, size, repeat=training.repeat_dataset)
    streams = [
        SequenceStream(
            index,
            parts=parts,
            tokenizer=tokenizer,
            seed=seed,
            global_batch_size=global_batch_size,
            seq_len=training.seq_len,
            mask_documents=training.mask_documents,
        )
        for index in sequences
    ]
    return StepReader(
        streams,
        parts,
        identity=Identity(
            fingerprint=_fingerprint(parts, [split for _, split in named], tokenizer),
            seed=seed,
            global_batch_size=global_batch_size,
            seq_len=training.seq_len,
            checksum="+".join(part.order.checksum() or "-" for part in parts),
        ),
        local_batch_size=training.local_batch_size,
        max_bad_documents=training.max_bad_documents,
    )


def _fingerprint(
    parts: Sequence[BlendSource], splits: Sequence[Split], tokenizer: Tokenizer
) -> str:
    """Names tokenizer, sources and weights. A source that nothing is held out of is `whole`."""
    sources = " + ".join(
        f"{part.weight:g} x {part.order.fingerprint}{':whole' * (split is Split.ALL)}"
        for part, split in zip(parts, splits, strict=True)
    )
    return f"{sources} as {tokenizer.fingerprint}"


def source_names(training: Training) -> list[str]:
    """How messages name the parts of the training data, in their order."""
    return [source.name for source in _training_sources(training)]


def _local_sequences(
    global_batch_size: int, rank: int, num_ranks: int, permutation: int
) -> list[int]:
    num_local, rest = divmod(global_batch_size, num_ranks)
    assert rest == 0, "the configuration's own checks let this through"
    order = list(range(global_batch_size))
    if permutation:
        order = np.random.default_rng(permutation).permutation(global_batch_size).tolist()
    return order[rank * num_local : (rank + 1) * num_local]


def build_validation(
    validation: Validation,
    training: Training,
    tokenizer: Tokenizer,
    *,
    seed: int,
    rank: int,
    num_ranks: int,
) -> ValidationLoader:
    """The validation set of data rank `rank`: `validation.dataset`, or what training holds out.

    ConfigError when a source is missing, unreadable or without documents, or would never end.
    """
    if endless := _endless_validation(validation, training):
        raise ConfigError(endless)
    shared = _shared_places(validation, training)
    parts = []
    for source in _validation_sources(validation, training):
        order = _open_order(
            source,
            tokenizer,
            split=Split.HELD_OUT if source.place in shared else Split.ALL,
            shuffle=False,
            seed=seed,
            sequences=range(1),
            global_batch_size=1,
            repeat=False,
            max_bad_documents=training.max_bad_documents,
        )
        if order.size == 0:
            raise ConfigError(
                [
                    f"{order.name} has too few documents to hold one "
                    "out: name a validation.dataset, or set validation.enable=false"
                ]
            )
        parts.append(BlendSource(order, source.weight))
    return ValidationLoader(
        parts,
        tokenizer,
        seq_len=validation.seq_len or training.seq_len,
        mask_documents=training.mask_documents,
        local_batch_size=validation.local_batch_size,
        max_bad_documents=training.max_bad_documents,
        steps=validation.steps,
        rank=rank,
        num_ranks=num_ranks,
    )


def _training_sources(training: Training) -> list[_Named]:
    if not training.blend:
        path, column = training.dataset_path, training.text_column
        return [_Named("training.", training.dataset, path, column, 1.0)]
    return [
        _Named(
            f"training.blend[{number}].",
            part.dataset,
            part.dataset_path,
            part.text_column or training.text_column,
            part.weight,
        )
        for number, part in enumerate(training.blend)
    ]


def _training_splits(
    training: Training, validation: Validation | None
) -> list[tuple[_Named, Split]]:
    """Each source, and whether validation takes held-out documents of it. The made-up language,
    of which there is enough, has one order in all runs."""
    shared = {("synthetic", os.path.realpath(""))}
    if validation is not None and validation.enable:
        shared |= _shared_places(validation, training)
    return [
        (source, Split.TRAIN if source.place in shared else Split.ALL)
        for source in _training_sources(training)
    ]


def _validation_sources(validation: Validation, training: Training) -> list[_Named]:
    if validation.dataset is None:
        return _training_sources(training)
    column = validation.text_column or training.text_column
    return [_Named("validation.", validation.dataset, validation.dataset_path, column, 1.0)]


def _shared_places(validation: Validation, training: Training) -> set[tuple[str, str]]:
    """Sources that training and validation divide between them."""
    trained_on = {source.place for source in _training_sources(training)}
    return trained_on & {source.place for source in _validation_sources(validation, training)}


def _endless_validation(validation: Validation, training: Training) -> list[str]:
    streams = [
        source.dataset
        for source in _validation_sources(validation, training)
        if is_stream(source.dataset)
    ]
    if not streams or validation.steps > 0:
        return []
    return [
        f"validation.steps={validation.steps} would read all of the stream {streams[0]!r}: "
        "set validation.steps to a number of batches"
    ]


def _open_order(
    source: _Named,
    tokenizer: Tokenizer,
    *,
    split: Split,
    shuffle: bool,
    seed: int,
    sequences: Sequence[int],
    global_batch_size: int,
    repeat: bool,
    max_bad_documents: float,
) -> DocumentOrder:
    opened = open_source(
        source.dataset,
        source.dataset_path,
        text_column=source.text_column,
        key=source.key,
        tokenizer=tokenizer.fingerprint,
        seed=seed,
        max_bad_documents=max_bad_documents,
    )
    if isinstance(opened, Corpus):
        size = len(opened) + opened.left_out.number
        left_out = opened.left_out
        if line := refusal(source.name, left_out, seen=size, size=size, most=max_bad_documents):
            raise ConfigError([line])
        drawn = seed if shuffle else None
        return CorpusOrder(source.name, opened, split=split, seed=drawn, repeat=repeat)
    return StreamOrder(
        source.name,
        opened,
        split=split,
        sequences=sequences,
        global_batch_size=global_batch_size,
        repeat=repeat,
    )


def _check_size(order: DocumentOrder, global_batch_size: int, *, repeat: bool) -> None:
    """Refuse a source with fewer documents than sequences: each needs one to be filled."""
    if order.size is None or order.size >= (1 if repeat else global_batch_size):
        return
    raise ConfigError(
        [
            f"{order.name} has {order.size:,} documents to train on, fewer "
            f"than the {global_batch_size:,} sequences of training.global_batch_size: add "
            "documents, choose a smaller global_batch_size, or set training.repeat_dataset=true"
        ]
    )
