"""Corpora of the Hugging Face hub, streamed by `datasets`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.data.bad_documents import BadDocuments, text_problem
from titan_moe.data.content import check_sizes, sampled_checksum
from titan_moe.data.documents import Document
from titan_moe.data.file_corpus import SUFFIXES, column_mark, endings_of, no_column
from titan_moe.data.hf_datasets import import_quietly, no_mixed_types, reason_of
from titan_moe.data.position import damaged
from titan_moe.runtime.errors import RunError, reason

# Short names for hub datasets: repository, configuration, split.
_ALIASES = {
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
}


class HubStream:
    """A hub dataset, or a local copy of one, read file by file without keeping it."""

    left_out = BadDocuments()

    def __init__(
        self, dataset: str, dataset_path: str | None, *, text_column: str = "text", key: str
    ) -> None:
        """`dataset`: `c4`, `owner/name` or `owner/name:configuration`, and `@revision` if it is not
        the latest. ConfigError if not found."""
        name, _, revision = dataset.partition("@")
        repository, configuration, split = _ALIASES.get(name, (name, "", "train"))
        if name not in _ALIASES:
            repository, _, configuration = name.partition(":")
        if dataset_path is not None and not Path(dataset_path).expanduser().exists():
            raise ConfigError([f"{key}dataset_path={dataset_path!r} does not exist"])
        self._name, self._path = dataset, dataset_path
        self._prefix = f"{key}dataset={dataset!r}"
        self._column, self._column_key = text_column, f"{key}text_column"
        self.fingerprint = f"hub:{dataset}{column_mark(text_column)}"
        datasets = import_quietly()
        try:
            if dataset_path is None:
                builder = datasets.load_dataset_builder(
                    repository, configuration or None, revision=revision or None
                )
                # The commit that the names in the builder lead to, whatever is pushed later.
                self.fingerprint += f":revision={builder.hash}"
            else:
                builder = datasets.load_dataset_builder(str(Path(dataset_path).expanduser()))
            if builder.name == "json":
                vars(builder.config).update(no_mixed_types())
            self._stream = builder.as_streaming_dataset(split=split)
        except Exception as error:  # Network, permission, format: each raises its own.
            place, remedy = f"{self._prefix}, read from the Hugging Face hub,", "name a local copy"
            if dataset_path is not None:
                place = f"{key}dataset_path={dataset_path!r}, a copy of {dataset!r},"
                remedy = "name a whole copy"
            raise ConfigError(
                [
                    f"{place} cannot be opened: {reason_of(error)}; {remedy} with "
                    f"{key}dataset_path, or use stdlib, synthetic, json, parquet, text or tokens"
                ]
            ) from None
        self._sizes = {path: path.stat().st_size for path in self._files()}
        self.num_files: int = self._stream.num_shards
        self._beginning = self._stream.state_dict()

    def checksum(self) -> str:
        if self._path is None:
            return ""
        return sampled_checksum(self._files())

    def _files(self) -> list[Path]:
        """Of a local copy."""
        if self._path is None:
            return []
        place = Path(self._path).expanduser()
        endings = tuple(end for name in SUFFIXES for end in endings_of(name))
        found = sorted(path for path in place.rglob("*") if path.name.endswith(endings))
        return found if place.is_dir() else [place]

    def file(self, index: int) -> HubStream:
        one = copy.copy(self)
        one._stream = self._stream.shard(num_shards=self.num_files, index=index)
        one.num_files = 1
        one._beginning = one._stream.state_dict()
        return one

    def read(self, mark: Any = None) -> Iterator[Document]:
        for example in self._examples(mark):
            words = self._column_key, self._column, self._prefix
            if self._column not in example:
                raise RunError(no_column(*words, example))
            text = example[self._column]
            problem = text_problem(text)
            yield Document(self._name, "" if problem else text, problem)
        check_sizes(self._sizes)  # JSON lines that were cut between two of them just end.

    def _examples(self, mark: Any) -> Iterator[dict[str, Any]]:
        try:
            # The beginning is loaded too: a state, once loaded, is where every later iteration
            # starts.
            self._stream.load_state_dict(self._beginning if mark is None else mark)
            examples = iter(self._stream)
            first = next(examples, None)
        except (ArithmeticError, AttributeError, LookupError, SystemError, TypeError) as error:
            if mark is None:
                raise
            raise damaged(f"marks hold no place of {self._name}: {reason(error)}") from error
        if first is not None:
            # What fails from here on is the data, but for a mark of a count that is asked later.
            yield first
            yield from examples

    def mark(self) -> Any:
        return self._stream.state_dict()
