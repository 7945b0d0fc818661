"""Documents without a text that can be read: counted, named, and refused beyond a share.

Such a document keeps its place in the order and is read as an empty one, so that the documents
around it are the same as without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# A stream is judged by no fewer documents: the first of it may be the only bad one.
_FEWEST_JUDGED = 1000


@dataclass(frozen=True)
class BadDocuments:
    """How many there are of a source, and what is wrong with the first, with its place."""

    number: int = 0
    first: str = ""

    def __add__(self, other: BadDocuments) -> BadDocuments:
        return BadDocuments(self.number + other.number, self.first or other.first)


def text_problem(value: object) -> str:
    """Why what a data set holds in place of a text is none; empty where it is one."""
    if value is None:
        return "has no text"
    if not isinstance(value, str):
        return f"holds {type(value).__name__}, not text"
    if "\0" in value:
        return "holds NUL characters, as UTF-16 or binary data does"
    return ""


def refusal(source: str, bad: BadDocuments, *, seen: int, size: int | None, most: float) -> str:
    """Why a run must stop; empty while there are few enough bad documents.

    Args:
        source: as messages name it.
        seen: documents read so far, the bad ones included.
        size: documents of the source; None where it is not known.
        most: training.max_bad_documents.
    """
    fewest = _FEWEST_JUDGED if size is None else min(size, _FEWEST_JUDGED)
    if bad.number <= most * max(seen, fewest):
        return ""
    return (
        f"{source}: {bad.number:,} of {seen:,} documents have no text that can be read, more than "
        f"training.max_bad_documents={most:g} allows; the first: {bad.first}. Mend or remove them, "
        "name the column of the text with training.text_column, or raise "
        "training.max_bad_documents"
    )


def counted(bad: BadDocuments) -> str:
    """What a log says of them."""
    return (
        f"{bad.number:,} documents have no text that can be read and count as empty ones; the "
        f"first: {bad.first}"
    )


def as_json(parts: Sequence[BadDocuments]) -> list[Any]:
    """By part of a blend; [] where no part has any."""
    if not any(part.number for part in parts):
        return []
    return [[part.number, part.first] for part in parts]


def from_json(found: Iterable[Any], num_parts: int) -> list[BadDocuments]:
    """What `as_json` was given."""
    return [BadDocuments(*part) for part in found] or [BadDocuments()] * num_parts


def add_parts(one: Sequence[BadDocuments], other: Sequence[BadDocuments]) -> list[BadDocuments]:
    """The sum, part by part."""
    return [a + b for a, b in zip(one, other, strict=True)]
