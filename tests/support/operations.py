"""Watches the operations that torch runs."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Calls `note` with each operation that has run while it is active, and its result."""

    def __init__(self, note: Callable[[Any, Any], object]) -> None:
        super().__init__()
        self._note = note

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # Operations in compiled graphs count too.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._note(func, result)
        return result
