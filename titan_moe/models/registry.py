"""Families and flavors by name. No torch.

A family is a folder with an `hf.py`. A flavor is a file `<family>/flavors/<flavor>.json`: a
config.json in the published form, which the family's `from_hf` reads. Its key "titan_moe" holds
fields of ModelConfig that such a file cannot say: weights of the training's losses, the balancing
of experts, initial values.
"""

import json
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from titan_moe.config.errors import ConfigError
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf_settings import text_of

FAMILIES = tuple(sorted(file.parent.name for file in Path(__file__).parent.glob("*/hf.py")))

T = TypeVar("T")


def family_module(family: str) -> Any:
    """Returns a family's module `hf`; `hf_family.py` explains its contents."""
    return import_module(f"titan_moe.models.{family}.hf")


@cache
def flavors(name: str) -> dict[str, ModelConfig]:
    """All flavors of a family. Raises ConfigError for a name that is no family."""
    if name not in FAMILIES:
        raise ConfigError(_unknown("model.name", name, FAMILIES))
    files = sorted((Path(__file__).parent / name / "flavors").glob("*.json"))
    return {file.stem: _read(name, file) for file in files}


def model_config(name: str, flavor: str) -> ModelConfig:
    """The dimensions of a flavor. Raises ConfigError, naming the nearest right one."""
    known = flavors(name)
    if flavor not in known:
        raise ConfigError(_unknown("model.flavor", flavor, tuple(known)))
    return known[flavor]


def _read(family: str, file: Path) -> ModelConfig:
    settings = json.loads(file.read_text(encoding="utf-8"))
    return _replaced(
        family_module(family).from_hf(text_of(settings)), settings.get("titan_moe", {})
    )


def _replaced(config: T, values: dict[str, Any]) -> T:
    """Returns a dataclass with other values. A table holds values of the dataclass in its field."""
    return replace(  # type: ignore[type-var]
        config,
        **{
            name: _replaced(getattr(config, name), value) if isinstance(value, dict) else value
            for name, value in values.items()
        },
    )


def _unknown(key: str, value: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(value, known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{key}='{value}' is unknown: {hint}choose one of {', '.join(known)}"
