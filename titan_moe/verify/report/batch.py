"""The page of a step's sequences: every token as text, targets and documents told apart."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, compress, groupby
from operator import attrgetter
from typing import Any, NamedTuple

from titan_moe.config.job_config import JobConfig, Training
from titan_moe.config.training_stages import job_of_step
from titan_moe.data.batch import IGNORE_INDEX, PackedSequence
from titan_moe.data.build import build_reader
from titan_moe.data.loader import StepReader, continue_state
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.verify.report.render import render

_SIGNS = {code: chr(0x2400 + code) for code in range(32)} | {9: "⇥\t", 10: "↵\n", 127: "␡"}
"""Signs for characters that are not seen, by their codes."""


class Piece(NamedTuple):
    """The text of a token, or of several that are one character together."""

    text: str
    ids: Sequence[int]
    place: int
    """The first token's position; the label behind the last token of a sequence has seq_len."""
    document: int
    is_target: bool
    kinds: str
    """Classes of the stylesheet."""


def read_sequences(
    job: JobConfig, tokenizer: Tokenizer, step: int, most: int
) -> list[PackedSequence]:
    """Returns the first `most` sequences of a step's global batch, which depends on no number of
    ranks. Reads the steps before it too; without stages, of these sequences alone.

    Raises ConfigError or RunError if the data cannot be read so far.
    """

    def open_reader(training: Training) -> StepReader:
        ranks = 1 if job.stages else max(1, training.global_batch_size // most)
        place: dict[str, Any] = {"num_ranks": ranks, "seed": job.debug.seed}
        training = training.model_copy(update={"local_batch_size": 1})
        return build_reader(training, tokenizer, validation=job.validation, **place)

    training = job_of_step(job, 1).training
    reader = open_reader(training)
    for number in range(1, step + 1):
        before, training = training, job_of_step(job, number).training
        if training != before:
            state, saved = reader.state_dict(), reader.identity
            reader = open_reader(training)
            reader.load_state_dict(continue_state(state, saved, reader.identity))
        sequences = reader.read_step()
    return [sequence for (sequence,) in sequences[:most]]


def batch_page(
    job: JobConfig, tokenizer: Tokenizer, step: int, sequences: Sequence[PackedSequence]
) -> str:
    """The first sequences of a step, token by token."""
    shown = [(counts(sequence), list(_documents(sequence, tokenizer))) for sequence in sequences]
    size = job_of_step(job, step).training.global_batch_size
    title = f"Step {step}: {len(shown)} of {size} sequences"
    about = f"{job.job.description}; model.tokenizer_path = {job.model.tokenizer_path}"
    total = {key: sum(each[key] for each, _ in shown) for key in shown[0][0]}
    return render("batch.html", title=title, about=about, total=total, sequences=shown)


def counts(sequence: PackedSequence) -> dict[str, int]:
    """Returns the numbers of a sequence's tokens, targets and documents, of the tokens that fill it
    up, and of those that its documents have lost."""
    return {
        "tokens": len(sequence.tokens_S),
        "targets": int((sequence.labels_S != IGNORE_INDEX).sum()),
        "documents": len(sequence.samples),
        "filler": int((sequence.documents_S >= len(sequence.samples)).sum()),
        "cut": sum(sequence.cut),
    }


def _documents(sequence: PackedSequence, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yields the documents of a sequence; what fills the rest has no name."""
    names, cut = dict(enumerate(sequence.samples)), dict(enumerate(sequence.cut))
    for number, members in groupby(_pieces(sequence, tokenizer), attrgetter("document")):
        pieces = list(members)
        tokens = int((sequence.documents_S == number).sum())
        targets = sum(len(piece.ids) for piece in pieces if piece.is_target)
        found = {"name": names.get(number), "cut": cut.get(number, 0), "pieces": pieces}
        yield found | {"tokens": tokens, "targets": targets}


def _pieces(sequence: PackedSequence, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Yields a sequence's pieces. A label is the token behind the one that it stands at: the last
    one of a text, which the next sequence begins with, is shown too."""
    ids, documents = sequence.tokens_S.tolist(), sequence.documents_S.tolist()
    is_target = [False, *(sequence.labels_S != IGNORE_INDEX).tolist()]
    if is_target[-1]:
        ids.append(int(sequence.labels_S[-1]))
        documents.append(documents[-1])
    contents, is_special = tokenizer.pieces(ids)
    keys = list(zip(documents, is_target, is_special, strict=False))
    # Bytes from 0x80 to 0xBF go on with a character of UTF-8.
    begins = [
        key[-1] or key != keys[place - 1] or not b"\x80" <= contents[place][:1] < b"\xc0"
        for place, key in enumerate(keys)
    ]
    for _, members in groupby(range(len(ids)), list(accumulate(begins)).__getitem__):
        places = list(members)
        first, end = places[0], places[-1] + 1
        content = b"".join(contents[first:end])
        text = content.decode(errors="backslashreplace")
        is_next = end > len(sequence.tokens_S)
        holds = (is_special[first], len(places) > 1, text.encode() != content, is_next)
        kinds = " ".join(compress(("special", "several", "hex", "next"), holds))
        shown = text.translate(_SIGNS)
        yield Piece(shown, ids[first:end], first, documents[first], is_target[first], kinds)
