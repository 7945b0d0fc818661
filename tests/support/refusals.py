"""Writes a configuration, and reads the line that answers a user's mistake, in it or elsewhere."""

from collections.abc import Callable
from pathlib import Path

import pytest

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError


def config_file(folder: Path, text: str) -> list[str]:
    """Writes a configuration; returns the words of a command line that reads it."""
    path = folder / "job.toml"
    path.write_text(text)
    return ["--job.config_file", str(path)]


def failure(call: Callable[..., object], *arguments: object) -> str:
    """Returns the RunError that a call raises, which is one line."""
    with pytest.raises(RunError) as caught:
        call(*arguments)
    (line,) = str(caught.value).splitlines()
    return line


def refusals(call: Callable[..., object], *arguments: object) -> list[str]:
    """Returns the lines of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return caught.value.lines


def refusal(call: Callable[..., object], *arguments: object) -> str:
    """Returns the one line of the ConfigError that a call raises."""
    (line,) = refusals(call, *arguments)
    return line
