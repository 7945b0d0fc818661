"""Families and flavors by name. Torch is imported only where a model is built."""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from titan_moe.config.errors import ConfigError
from titan_moe.models.config import ModelConfig

if TYPE_CHECKING:
    from titan_moe.models.decoder import Decoder
    from titan_moe.models.layers.attention_core import AttentionCore
    from titan_moe.models.tensor_plans import TensorPlan

FAMILIES = ("deepseek_v3", "qwen3")


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


def build_model(name: str, config: ModelConfig, core: "AttentionCore") -> "Decoder":
    """The plain single-device model of a family, on the current default device."""
    return import_module(f"titan_moe.models.{name}.model").build(config, core)


def tensor_plan(name: str) -> "TensorPlan":
    """How a family's modules may be cut over tensor-parallel ranks."""
    return import_module(f"titan_moe.models.{name}.model").TENSOR_PLAN


def _unknown(key: str, value: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(value, known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{key}='{value}' is unknown: {hint}choose one of {', '.join(known)}"
