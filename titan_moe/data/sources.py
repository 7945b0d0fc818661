"""The sources that the configuration names, checked before a run and opened in it."""

from __future__ import annotations

from pathlib import Path

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import (
    DATASETS_WITHOUT_COLUMNS,
    DATASETS_WITHOUT_PATH,
    Dataset,
    Training,
    Validation,
)
from titan_moe.data.builtin import StdlibConversations, StdlibCorpus, SyntheticCorpus
from titan_moe.data.corpus import CORPORA, FORMATS, FileCorpus, Source, find_files
from titan_moe.data.megatron import MegatronCorpus
from titan_moe.data.order import Corpus
from titan_moe.data.stream import HubCorpus, HubStream
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.data.tokens import TokenCorpus

# 2,000 documents of C4 that lie, as JSON lines, in torchtitan's repository and not in this one.
_C4_TEST_FOLDER = "tests/assets/c4_test"


def check_source(source: Source, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError for mistakes that show without reading the data: a wrong path, ids of
    another tokenizer (None: do not compare)."""
    has_columns = source.dataset not in DATASETS_WITHOUT_COLUMNS
    if source.text_column is None and not has_columns and source.dataset != "stdlib":
        raise ConfigError(
            f"{source.name} holds no conversations, as {source.column_name} asks for: choose "
            "stdlib, json, parquet or a Hugging Face name"
        )
    if source.dataset in DATASETS_WITHOUT_PATH:
        if source.dataset_path is not None:
            raise ConfigError(f"{source.path_name} has no use with {source.name}: leave it out")
    elif source.dataset in ("tokens", "megatron"):
        CORPORA[source.dataset](source, tokenizer, 0)
    elif source.dataset in FORMATS:
        find_files(source)
    elif source.path is None and "/" in source.dataset and Path(source.dataset).is_dir():
        raise ConfigError(f"{source.name} is a folder here: name it in {source.key}dataset_path")
    elif source.path is not None and not source.path.exists():
        raise ConfigError(f"{source.path_name} does not exist: name a copy, or leave it out")


def open_source(source: Source, tokenizer: Tokenizer, seed: int) -> Corpus | HubStream:
    """Open a source.

    Raises ConfigError if it is missing, empty, unreadable or made for another tokenizer.
    """
    check_source(source, tokenizer)
    if source.dataset not in CORPORA:
        # Conversations are packed by their lengths, which must be known of all.
        return HubStream(source) if source.text_column is not None else HubCorpus(source)
    return CORPORA[source.dataset](source, tokenizer, seed)


def training_sources(training: Training) -> list[Source]:
    """The sources of the training data, in the order of the blend."""
    return [
        _source(f"training.blend[{number}].", part, training, part.weight)
        for number, part in enumerate(training.blend)
    ] or [_source("training.", training, training)]


def _source(
    key: str, section: Training | Dataset | Validation, training: Training, weight: float = 1.0
) -> Source:
    """A section's source, with the name that stands for local files replaced by format and path."""
    dataset, path = section.dataset or "", section.dataset_path
    if dataset == "c4_test":
        dataset, path = "json", path or _C4_TEST_FOLDER
    column = section.text_column or training.text_column
    is_text = training.dataset_format == "text"
    return Source(key, dataset, path, column if is_text else None, weight)


def validation_sources(validation: Validation, training: Training) -> list[Source]:
    """The sources of the validation set: those of training unless it names another."""
    if validation.dataset is None:
        return training_sources(training)
    return [_source("validation.", validation, training)]


def endless_validation(validation: Validation, training: Training) -> list[str]:
    """Returns an error line for each stream that a validation without a number of steps would
    read to its end."""
    if validation.steps > 0:
        return []
    return [
        f"validation.steps={validation.steps} would read all of the stream {source.dataset!r}: "
        "set validation.steps to a number of batches"
        for source in validation_sources(validation, training)
        if source.is_stream and training.dataset_format == "text"
    ]


def all_sources(validation: Validation, training: Training) -> list[Source]:
    """The sources of training, and of validation if it has its own."""
    own = validation_sources(validation, training) if validation.enable else []
    return list(dict.fromkeys(training_sources(training) + own))


def shared_places(validation: Validation, training: Training) -> set[tuple[str, str]]:
    """Places of the sources that training and validation divide between them."""
    trained_on = {source.place for source in training_sources(training)}
    return trained_on & {source.place for source in validation_sources(validation, training)}


CORPORA |= {
    "stdlib": lambda source, tokenizer, seed: (
        StdlibCorpus() if source.text_column is not None else StdlibConversations()
    ),
    "synthetic": lambda source, tokenizer, seed: SyntheticCorpus(seed),
    "tokens": lambda source, tokenizer, seed: TokenCorpus(source, tokenizer),
    "megatron": lambda source, tokenizer, seed: MegatronCorpus(source),
    **dict.fromkeys(FORMATS, lambda source, tokenizer, seed: FileCorpus(source)),
}
