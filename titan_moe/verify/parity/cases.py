"""The models that are compared with those of `transformers`: tiny config.json files in cases.json.

A family's base is its plain case; each option names the settings that differ. The borders of
YaRN's blended channels lie inside a head of 8 channels, between two of them. As many experts as
groups would never be limited by the groups of their best.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, eq=False)
class ParityCase:
    """A tiny config.json of one family with one option set."""

    family: str
    option: str
    settings: dict[str, Any]
    """A config.json of transformers 5, which writes `rope_parameters`."""
    expert_scale: float = 1.0
    """A factor on the experts' first matrices, to reach the limits of their activation."""
    zero_gradients: tuple[str, ...] = ()
    """Weights of ours whose gradient is nothing but rounding: its exact value is zero. Without
    positions a bias of all keys moves each query's scores alike."""

    def __str__(self) -> str:
        return f"{self.family}: {self.option}"


def cases() -> Iterator[ParityCase]:
    """Yields all cases, a family's plain one first."""
    text = (files("titan_moe.verify.parity") / "cases.json").read_text(encoding="utf-8")
    for family, table in json.loads(text).items():
        for option, more in table["options"].items():
            settings = table["base"] | more.pop("settings", {})
            yield ParityCase(family, option, settings, **more)
