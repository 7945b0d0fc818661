"""From `dataset` and `dataset_path` to a corpus or a stream."""

from __future__ import annotations

from pathlib import Path

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import DATASETS_WITHOUT_PATH
from titan_moe.data.builtin import StdlibCorpus, SyntheticCorpus
from titan_moe.data.documents import Corpus, Stream
from titan_moe.data.file_corpus import SUFFIXES, FileCorpus, find_files
from titan_moe.data.hub import HubStream
from titan_moe.data.tokens import TokenCorpus

# 2,000 documents of C4 that lie, as JSON lines, in torchtitan's repository and not in this one.
_C4_TEST, _C4_TEST_FOLDER = "c4_test", "tests/assets/c4_test"


def is_stream(dataset: str) -> bool:
    """Whether `dataset` is read from beginning to end (a hub dataset) and its length not known."""
    return dataset not in (*DATASETS_WITHOUT_PATH, "tokens", _C4_TEST, *SUFFIXES)


def open_source(
    dataset: str,
    dataset_path: str | None,
    *,
    text_column: str,
    key: str,
    tokenizer: str,
    seed: int,
    max_bad_documents: float = 1.0,
) -> Corpus | Stream:
    """Open one source.

    text_column: where there are columns.
    max_bad_documents: share of its documents that may have no text (training.max_bad_documents).
    key: what the user writes before `dataset`, such as "training." or "--", for messages.
    tokenizer: the tokenizer's fingerprint.
    ConfigError when it is missing, empty, unreadable or made for another tokenizer.
    """
    check_source(dataset, dataset_path, key=key, tokenizer=tokenizer)
    dataset, dataset_path = _as_files(dataset, dataset_path)
    if dataset == "stdlib":
        return StdlibCorpus()
    if dataset == "synthetic":
        return SyntheticCorpus(seed)
    if dataset == "tokens":
        return _open_tokens(dataset_path, key=key, tokenizer=tokenizer)
    if dataset in SUFFIXES:
        return FileCorpus(
            dataset,
            dataset_path,
            text_column=text_column,
            key=key,
            max_bad_documents=max_bad_documents,
        )
    return HubStream(dataset, dataset_path, text_column=text_column, key=key)


def check_source(
    dataset: str, dataset_path: str | None, *, key: str, tokenizer: str | None
) -> None:
    """ConfigError for what shows without reading the data: a wrong path, another tokenizer's ids.

    `tokenizer` None: it could not be loaded, do not compare.
    """
    if dataset == _C4_TEST and not Path(dataset_path or _C4_TEST_FOLDER).expanduser().exists():
        raise ConfigError(
            [
                f"{key}dataset='c4_test' is {_C4_TEST_FOLDER} of torchtitan's repository, and "
                f"{dataset_path or _C4_TEST_FOLDER} does not exist: set {key}dataset_path to a "
                f"copy, or choose {key}dataset=stdlib"
            ]
        )
    dataset, dataset_path = _as_files(dataset, dataset_path)
    if dataset in DATASETS_WITHOUT_PATH:
        if dataset_path is not None:
            raise ConfigError(
                [
                    f"{key}dataset_path={dataset_path!r} has no use with {key}dataset="
                    f"{dataset!r}: leave it out, or choose json, parquet, text or tokens"
                ]
            )
    elif dataset == "tokens":
        _open_tokens(dataset_path, key=key, tokenizer=tokenizer)
    elif dataset in SUFFIXES:
        find_files(dataset, dataset_path, key=key)
    elif dataset_path is not None and not Path(dataset_path).expanduser().exists():
        raise ConfigError(
            [f"{key}dataset_path={dataset_path!r} does not exist: name a copy, or leave it out"]
        )


def _as_files(dataset: str, dataset_path: str | None) -> tuple[str, str | None]:
    """A name that stands for files, as their format and path."""
    if dataset == _C4_TEST:
        return "json", dataset_path or _C4_TEST_FOLDER
    return dataset, dataset_path


def _open_tokens(dataset_path: str | None, *, key: str, tokenizer: str | None) -> TokenCorpus:
    if dataset_path is None:
        raise ConfigError(
            [f"{key}dataset='tokens' needs {key}dataset_path: a folder made by titan-moe tokenize"]
        )
    folder = Path(dataset_path).expanduser()
    return TokenCorpus(folder, tokenizer=tokenizer, key=f"{key}dataset_path")
