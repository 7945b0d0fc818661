"""The one configuration error, and mistakes whose remedies are tried before they are named."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Change = Mapping[str, Any]
"""New values by dotted keys; "ranks" is the number of ranks."""


def as_written(value: object) -> str:
    """Returns a value as TOML and a command line have it; null where a key is left out."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Mistake:
    """A broken rule whose remedies `checks.job.check` tries: a remedy that breaks another rule is
    not named."""

    line: str
    """Key, value, and what is wrong."""
    remedies: Sequence[Sequence[Change]]
    """Alternatives. Of each the first change that works is named."""
    otherwise: str = ""
    """The remedy if no change works."""
    also: str = ""
    """A further remedy, which is no change of keys."""

    def __str__(self) -> str:
        return f"{self.line}: {self.otherwise}"


class ConfigError(Exception):
    """Everything wrong with a configuration, a line each: key, value, remedy. Exit code 2.

    A single line may be given as it is.
    """

    def __init__(self, lines: list[str] | str) -> None:
        self.lines = [lines] if isinstance(lines, str) else lines
        super().__init__(self.lines)  # All of them, so that a pickled error keeps its lines apart.

    def __str__(self) -> str:
        return "\n".join(self.lines)
