"""Reads the line that answers a user's mistake."""

from collections.abc import Callable

import pytest

from titan_moe.config.errors import ConfigError


def refusal(call: Callable[..., object], *arguments: object) -> str:
    """Returns the one line of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    (line,) = caught.value.lines
    return line
