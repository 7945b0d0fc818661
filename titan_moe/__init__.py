"""The functions that users call by the package's own name, imported at their first use."""

from importlib import import_module
from typing import Any

_PLACES = {
    "continue_text": "titan_moe.cli.generation",
    "load_model": "titan_moe.cli.generation",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
