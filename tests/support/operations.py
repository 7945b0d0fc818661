"""Watches the operations that torch runs, and its collectives."""

from collections import Counter
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
    """Sees the operations that run while it is active, those of compiled graphs included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        """Number of calls of each operation, by its name without the overload."""
        self.shapes: set[Size] = set()
        """Shapes of all tensors that operations returned."""
        self.num_bytes = 0
        """Sizes of these tensors, views included."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls[str(func).rpartition(".")[0]] += 1
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.shapes.update(x.shape for x in tensors)
        self.num_bytes += sum(x.nbytes for x in tensors)
        return result


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
