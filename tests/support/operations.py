"""Watches the operations that torch runs, and its collectives."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


@contextmanager
def shapes_of_results() -> Iterator[set[Size]]:
    """Collects the shapes of the tensors that operations return while the block runs."""
    found: set[Size] = set()

    def note(func: Any, result: Any) -> None:
        found.update(x.shape for x in tree_leaves(result) if isinstance(x, Tensor))

    with Operations(note):
        yield found


@contextmanager
def without_waits() -> Iterator[None]:
    """Makes an error of each wait of the host for CUDA while the block runs."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def watch_collectives(names: Iterable[str], note: Callable[[str, Any], object]) -> None:
    """Calls `note` with the name and the group of each call of these functions of torch.distributed
    that names its group or goes over the world, for the rest of this process."""

    def watched(name, operation, *args, **kwargs):
        note(name, kwargs.get("group") or dist.group.WORLD)
        return operation(*args, **kwargs)

    for name in names:
        setattr(dist, name, partial(watched, name, getattr(dist, name)))
