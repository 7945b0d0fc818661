"""Families and flavors by name. No torch."""

from difflib import get_close_matches
from importlib import import_module

from titan_moe.config.errors import ConfigError
from titan_moe.models.config import ModelConfig

FAMILIES = ("deepseek_v3", "gpt_oss", "llama4", "mixtral", "qwen3")


def flavors(name: str) -> dict[str, ModelConfig]:
    """All flavors of a family. Raises ConfigError for a name that is no family."""
    if name not in FAMILIES:
        raise ConfigError([_unknown("model.name", name, FAMILIES)])
    return import_module(f"titan_moe.models.{name}.config").FLAVORS


def model_config(name: str, flavor: str) -> ModelConfig:
    """The dimensions of a flavor. Raises ConfigError, naming the nearest right one."""
    known = flavors(name)
    if flavor not in known:
        raise ConfigError([_unknown("model.flavor", flavor, tuple(known))])
    return known[flavor]


def _unknown(key: str, value: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(value, known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{key}='{value}' is unknown: {hint}choose one of {', '.join(known)}"
