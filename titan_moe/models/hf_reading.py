"""Reads values of a config.json. No torch."""

from collections.abc import Mapping
from typing import Any

from titan_moe.config.errors import ConfigError

Settings = Mapping[str, Any]
"""A config.json."""


def needed(settings: Settings, key: str) -> Any:
    """A value without which there is no model. Raises ConfigError where it is missing or null."""
    if settings.get(key) is None:
        raise ConfigError(f"config.json: {key} is missing")
    return settings[key]


def given(settings: Settings, key: str, default: Any) -> Any:
    """A value, or the default where it is missing or null."""
    value = settings.get(key)
    return default if value is None else value


def only(settings: Settings, **allowed: tuple[Any, ...]) -> None:
    """Raises ConfigError for a key with a value other than these; one without a value passes."""
    lines = [
        f"config.json: {key}={settings[key]!r} is not supported: only "
        + " or ".join(map(repr, values))
        for key, values in allowed.items()
        if settings.get(key) is not None and settings[key] not in values
    ]
    if lines:
        raise ConfigError(lines)
