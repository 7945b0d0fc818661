"""Hands `datasets` the texts of files: it converts them once, or streams them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets

from titan_moe.data.conversations import COLUMN
from titan_moe.data.texts import ColumnError, read_batches


@dataclass
class TextsConfig(datasets.BuilderConfig):
    """The files of one split, by path or address. A conversion is found again by all of it."""

    # Version of the way files are read: raise it when the same file gives other texts.
    version: Any = "1.1.0"
    files: Sequence[str] = ()
    form: str = "json"
    column: str | None = "text"
    stamps: Sequence[tuple[int, int]] = ()
    """Sizes and times of local files."""


class Texts(datasets.ArrowBasedBuilder):
    """A set of one column. The builders of `datasets` read all columns, of types that the first
    rows have (its `columns` of Parquet aside), expand * and [ in names, and refuse a set for one
    record."""

    BUILDER_CONFIG_CLASS = TextsConfig

    def _info(self) -> datasets.DatasetInfo:
        features = {self._name: datasets.Value("large_string")}
        return datasets.DatasetInfo(features=datasets.Features(features))

    @property
    def _name(self) -> str:
        return self.config.column or COLUMN

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        files = list(self.config.files)
        if not files[0].startswith("/"):
            files = dl_manager.download(files)
        return [datasets.SplitGenerator(name="train", gen_kwargs={"files": files})]

    def _generate_tables(self, files: list[str]) -> Iterator[tuple[Any, Any]]:
        import pyarrow as pa

        column = self.config.column
        for number, file in enumerate(files):
            rows = 0
            try:
                for batch in read_batches(file, self.config.form, column):
                    yield (number, 0), pa.table({self._name: batch})
                    rows += len(batch)
            except ColumnError:
                raise
            except Exception as error:  # Each format and compression raises its own.
                place = f"after document {rows:,}: " if rows else ""
                raise ValueError(f"{file}: {place}{error}") from None
