"""Looks at the data before a run: mistakes that show quickly, notes, and samples of each source."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from operator import itemgetter

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training, Validation
from titan_moe.data.batch import Encoded
from titan_moe.data.build import build_reader, build_validation
from titan_moe.data.corpus import left_out
from titan_moe.data.order import CorpusOrder, OutOfDocumentsError
from titan_moe.data.packed_conversations import MOST_SAMPLED, measure
from titan_moe.data.sequences import read_document
from titan_moe.data.sources import all_sources, check_source, endless_validation
from titan_moe.data.stream import DocumentOrder, HubStream, StreamOrder
from titan_moe.data.tokenizer import Tokenizer, load_tokenizer
from titan_moe.data.validation import ValidationLoader
from titan_moe.runtime.errors import RunError

_MOST_SHOWN = 1000  # Tokens of a conversation.
_FEW = 8  # Fewer held-out documents make the validation loss noisy.


def check_data(training: Training, validation: Validation, tokenizer_path: str) -> list[str]:
    """Returns everything wrong with data and tokenizer that can be found quickly, one line each."""
    lines: list[str] = []
    tokenizer = None
    try:
        tokenizer = load_tokenizer(tokenizer_path, training)
    except ConfigError as error:
        lines += error.lines
    if validation.enable:
        lines += endless_validation(validation, training)
    for source in all_sources(validation, training):
        try:
            check_source(source, tokenizer)
            if source.is_stream and source.path is not None:
                HubStream(source)
        except ConfigError as error:
            lines += error.lines
    return lines


def data_notes(training: Training, validation: Validation) -> list[str]:
    """Returns one line about each source beside whose files lie others, which are not read."""
    lines = []
    for source in all_sources(validation, training):
        files = HubStream(source).local if source.is_stream and source.path else ()
        lines += left_out(source, {path.resolve() for path in files})
    return lines


def sample_data(
    training: Training, validation: Validation, tokenizer: Tokenizer, *, seed: int
) -> list[str]:
    """Open each source as a run does and read some documents; returns a line about each source.

    Nothing is opened if a source is on the hub, without a local copy. `training` has a
    global_batch_size. ConfigError when a source cannot be trained on.
    """
    if name := on_the_hub(training, validation):
        return [f"the data was not read: {name!r} is on the Hugging Face hub"]
    reader = build_reader(training, tokenizer, seed=seed, validation=validation)
    # The sources of a blend have epochs of their own lengths.
    sources = reader.sequences.sources
    size = training.global_batch_size if len(sources) == 1 else 0
    orders, few = [(source.order, "training", size) for source in sources], []
    if validation.enable:
        loader = build_validation(validation, training, tokenizer, seed=seed)
        orders += [(source.order, "validation", 0) for source in loader.sources]
        few = few_held_out(loader, validation)
    lines = [line for each in orders for line in _sample(*each, tokenizer, training.seq_len)]
    notes = tokenizer.conversations.notes() if tokenizer.conversations else []
    return lines + few + notes


def on_the_hub(training: Training, validation: Validation) -> str | None:
    """Returns the first source on the Hugging Face hub of which there is no local copy."""
    sources = all_sources(validation, training)
    return next((s.dataset for s in sources if s.is_stream and s.dataset_path is None), None)


def few_held_out(loader: ValidationLoader, validation: Validation) -> list[str]:
    """Returns one line about each corpus of whose documents fewer than 8 are held out."""
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
    """Returns a line about a source, with the steps of its epochs if a step has `size` sequences;
    0: of unknown size; and more about its conversations. ConfigError if its first documents cannot
    be read."""
    count = min(MOST_SAMPLED, order.size or 1)
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
    found = measure(order.corpus, tokenizer, seq_len, name=order.name, indices=range(count))
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
    """Returns the text of a conversation's first tokens, with signs around its targets."""
    contents, _ = tokenizer.pieces(encoded.ids[:_MOST_SHOWN])
    assert encoded.is_target is not None, "a text is not shown"
    is_target = encoded.is_target[:_MOST_SHOWN]
    text = b""
    for learned, group in groupby(zip(contents, is_target, strict=True), itemgetter(1)):
        said = b"".join(content for content, _ in group)
        text += "⟪".encode() + said + "⟫".encode() if learned else said
    more = len(encoded.ids) - len(contents)
    return text.decode(errors="replace") + f" … and {more:,} tokens" * (more > 0)
