"""Builds readers from the configuration's tables. Imports no torch: checks before a run use it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training, Validation
from titan_moe.data.batch import Encoded
from titan_moe.data.corpus import Source, left_out
from titan_moe.data.loader import StepReader
from titan_moe.data.order import Corpus, CorpusOrder, OutOfDocumentsError, Split
from titan_moe.data.packed_conversations import ConversationSequences, Lengths, measure
from titan_moe.data.sequences import (
    BlendSource,
    Identity,
    TextSequences,
    read_document,
)
from titan_moe.data.sources import (
    all_sources,
    check_source,
    open_source,
    shared_places,
    training_sources,
    validation_sources,
)
from titan_moe.data.stream import DocumentOrder, HubStream, StreamOrder
from titan_moe.data.tokenizer import Tokenizer, load_tokenizer
from titan_moe.data.validation import ValidationLoader
from titan_moe.runtime.errors import RunError

_MOST_SAMPLED = 64  # Documents of each source that the check reads.
_MOST_SHOWN = 1000  # Tokens of a conversation that it shows.
_FEW = 8  # Fewer held-out documents make the validation loss noisy.


def check_data(training: Training, validation: Validation, tokenizer_path: str) -> list[str]:
    """Everything wrong with data and tokenizer that can be found quickly, one line each."""
    lines: list[str] = []
    tokenizer = None
    try:
        tokenizer = load_tokenizer(tokenizer_path, training)
    except ConfigError as error:
        lines += error.lines
    if validation.enable:
        lines += _endless_validation(validation, training)
    for source in all_sources(validation, training):
        try:
            check_source(source, tokenizer)
            if source.is_stream and source.path is not None:
                HubStream(source)
        except ConfigError as error:
            lines += error.lines
    return lines


def data_notes(training: Training, validation: Validation) -> list[str]:
    """One line about each source beside whose files lie others, which are not read."""
    lines = []
    for source in all_sources(validation, training):
        files = HubStream(source).local if source.is_stream and source.path else ()
        lines += left_out(source, {path.resolve() for path in files})
    return lines


def sample_data(
    training: Training, validation: Validation, tokenizer: Tokenizer, **how: Any
) -> list[str]:
    """Open each source as a run does and read some documents; returns a line about each source.

    Nothing is opened if a source is on the hub, without a local copy. `how`: further keywords of
    `build_reader`. ConfigError when a source cannot be trained on.
    """
    if name := on_the_hub(training, validation):
        return [f"the data was not read: {name!r} is on the Hugging Face hub"]
    place: dict[str, Any] = {"seed": how["seed"], "rank": 0, "num_ranks": 1}
    reader = build_reader(training, tokenizer, validation=validation, **how | place)
    # The sources of a blend have epochs of their own lengths.
    sources = reader.sequences.sources
    size = how["global_batch_size"] if len(sources) == 1 else 0
    orders, few = [(source.order, "training", size) for source in sources], []
    if validation.enable:
        loader = build_validation(validation, training, tokenizer, **place)
        orders += [(source.order, "validation", 0) for source in loader.sources]
        few = few_held_out(loader, validation)
    lines = [line for each in orders for line in _sample(*each, tokenizer, training.seq_len)]
    notes = tokenizer.conversations.notes() if tokenizer.conversations else []
    return lines + few + notes


def on_the_hub(training: Training, validation: Validation) -> str | None:
    """Returns the first source on the Hugging Face hub of which there is no local copy."""
    sources = all_sources(validation, training)
    return next((s.dataset for s in sources if s.is_stream and s.dataset_path is None), None)


def build_reader(
    training: Training,
    tokenizer: Tokenizer,
    *,
    seed: int,
    rank: int,
    num_ranks: int,
    global_batch_size: int,
    permutation: int = 0,
    validation: Validation | None = None,
    lengths: Sequence[np.ndarray] | None = None,
) -> StepReader:
    """The reader of data rank `rank` of `num_ranks`. It reads a contiguous range of the global
    batch's sequences, or of the order that the seed `permutation` gives them. Leaves out the
    documents that `validation` holds out. lengths: as `ConversationSequences` takes them.

    ConfigError when a source is missing, unreadable or has fewer documents than sequences.
    """
    order = np.arange(global_batch_size)
    if permutation:
        order = np.random.default_rng(permutation).permutation(global_batch_size)
    of_ranks = order[: global_batch_size // num_ranks * num_ranks].reshape(num_ranks, -1)
    sequences = of_ranks[rank].tolist()
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
            global_batch_size=global_batch_size,
            epochs=training.epochs or (None if training.repeat_dataset else 1),
        )
        if tokenizer.conversations is None:
            _check_size(opened, global_batch_size, repeat=training.repeat_dataset)
        sources.append(BlendSource(opened, source.weight))
        names.append(f"{source.weight:g} x {opened.fingerprint}{_split_mark(split)}")
    identity = Identity(
        fingerprint=" + ".join(names),
        **tokenizer.identity(),
        seed=seed,
        global_batch_size=global_batch_size,
        seq_len=training.seq_len,
        checksum="+".join(source.order.checksum() or "-" for source in sources),
    )
    read: TextSequences | ConversationSequences
    if tokenizer.conversations is None:
        mask = training.mask_documents
        read = TextSequences(sources, tokenizer, identity, own=sequences, mask_documents=mask)
    else:
        read = ConversationSequences(sources, tokenizer, identity, own=sequences, lengths=lengths)
    return StepReader(read, identity=identity, local_batch_size=training.local_batch_size)


def measure_conversations(
    training: Training, tokenizer: Tokenizer, *, seed: int, part: int, parts: int
) -> list[Lengths]:
    """The lengths of one part of each source's conversations. Raises ConfigError as `build_reader`
    does."""
    found = []
    for source in training_sources(training):
        corpus = open_source(source, tokenizer, seed)
        assert isinstance(corpus, Corpus)
        how: dict[str, Any] = {"name": source.name, "indices": range(part, len(corpus), parts)}
        found.append(measure(corpus, tokenizer, training.seq_len, **how))
    return found


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
    return ValidationLoader(
        sources,
        tokenizer,
        validation=validation,
        training=training,
        rank=rank,
        num_ranks=num_ranks,
    )


def few_held_out(loader: ValidationLoader, validation: Validation) -> list[str]:
    """One line about each corpus of whose documents fewer than 8 are held out."""
    every = f"validation.held_out_every={validation.held_out_every}"
    remedy = "a noisy loss: choose a smaller one, or name a validation.dataset"
    return [
        f"{every} holds out {order.size} of {len(order.corpus)} documents of {order.name}, {remedy}"
        for order in (source.order for source in loader.sources)
        if isinstance(order, CorpusOrder) and order.size < min(_FEW, len(order.corpus))
    ]


def _sample(
    order: DocumentOrder, use: str, size: int, tokenizer: Tokenizer, seq_len: int
) -> list[str]:
    """A line about a source, with the steps of its epochs if a step has `size` sequences; 0: of
    unknown size; and more about its conversations. ConfigError if its first documents cannot be
    read."""
    count = min(_MOST_SAMPLED, order.size or 1)
    try:
        documents = [order.document(number) for number in range(count)]
        read = [read_document(document, tokenizer, seq_len) for document in documents]
    except OutOfDocumentsError:
        raise ConfigError(f"{order.name} holds no document") from None
    except RunError as error:
        raise ConfigError(str(error)) from None
    if isinstance(order, StreamOrder):
        return [f"{order.name}, for {use}: {order.description}"]
    tokens = sum(len(document.ids) for document in read if document) * order.size // count
    epochs = order.epochs or 1
    name = "an epoch" if epochs == 1 else f"{epochs} epochs"
    steps = f", {name} about {round(epochs * tokens / size / seq_len) or 1:,} steps" if size else ""
    line = f"{order.name}, for {use}: {order.size:,} documents, about {tokens:,} tokens{steps}"
    conversations = tokenizer.conversations
    if conversations is None:
        return [line]
    if unseen := sorted(conversations.unseen_roles):
        line += f"; of {count} conversations none has the role {unseen[0]!r}"
    inside = [
        f"{token!r} in {document.name}"
        for document in documents
        if (token := conversations.special_inside(str(document.content)))
    ]
    if inside:
        line += f"; {len(inside)} of {count} conversations name special tokens, as {inside[0]}"
    how: dict[str, Any] = {"name": order.name, "indices": range(count)}
    found = measure(order.corpus, tokenizer, seq_len, **how)
    lines = [line, *found.lines(order.name, count, conversations.max_refused)]
    in_file = (read_document(order.corpus[n], tokenizer, seq_len) for n in range(count))
    if use == "training" and (first := next(filter(None, in_file), None)):
        shown, left_out = _shown(first, tokenizer), Counter[str]()
        for document, encoded in zip(documents, read, strict=True):
            if encoded:
                left_out.update(e.kind for e in conversations.left_out(str(document.content)))
        says = ", ".join(f"{left_out[kind]} {kind}" for kind in left_out) or "nothing"
        lines.append(f"of {count} conversations the chat template leaves out {says}")
        lines.append(f"{first.name}, what is learned between ⟪ and ⟫:\n{shown}")
    return lines


def _shown(encoded: Encoded, tokenizer: Tokenizer) -> str:
    """The text of a conversation's first tokens, with signs around its targets."""
    contents, _ = tokenizer.pieces(encoded.ids[:_MOST_SHOWN])
    is_target = np.zeros(len(contents), bool)
    if encoded.is_target is not None:
        is_target = encoded.is_target[:_MOST_SHOWN]
    text = b""
    for learned, group in groupby(zip(contents, is_target, strict=True), itemgetter(1)):
        said = b"".join(content for content, _ in group)
        text += "⟪".encode() + said + "⟫".encode() if learned else said
    more = len(encoded.ids) - len(contents)
    return text.decode(errors="replace") + f" … and {more:,} tokens" * (more > 0)


def _endless_validation(validation: Validation, training: Training) -> list[str]:
    if validation.steps > 0:
        return []
    return [
        f"validation.steps={validation.steps} would read all of the stream {source.dataset!r}: "
        "set validation.steps to a number of batches"
        for source in validation_sources(validation, training)
        if source.is_stream and training.dataset_format == "text"
    ]


def _split_mark(split: Split) -> str:
    """The suffix of a fingerprint for other documents than the default's."""
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
            _check_conversations(source, opened, tokenizer)
        seed_or_none = seed if shuffle else None
        return CorpusOrder(source.name, opened, split=split, seed=seed_or_none, epochs=epochs)
    return StreamOrder(
        source.name,
        opened,
        split=split,
        sequences=sequences,
        global_batch_size=global_batch_size,
        repeat=epochs is None,
    )


def _check_conversations(source: Source, corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Refuse a source of whose first conversations too many are refused, or none has anything to
    learn."""
    assert tokenizer.conversations is not None
    first = range(min(len(corpus), _MOST_SAMPLED))
    found = measure(corpus, tokenizer, None, name=source.name, indices=first)
    found.lines(source.name, len(first), tokenizer.conversations.max_refused)
    if not found.tokens.any():
        raise ConfigError(
            f"{source.name}: no message of its first {_MOST_SAMPLED} conversations is to be "
            "learned: choose other training.messages.targets, or mend the roles"
        )


def _check_size(order: DocumentOrder, global_batch_size: int, *, repeat: bool) -> None:
    """Refuse a source with fewer documents than sequences: each needs one to be filled."""
    if order.size is None or order.size >= (1 if repeat else global_batch_size):
        return
    raise ConfigError(
        f"{order.name} has {order.size:,} documents to train on, fewer "
        f"than the {global_batch_size:,} sequences of training.global_batch_size: add "
        "documents, choose a smaller global_batch_size, or set training.repeat_dataset=true"
    )
