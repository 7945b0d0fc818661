"""What a compiled function's elementwise operations come to once they are fused.

Under a rehearsal torch.compile lets everything run one by one, as Dynamo does beneath any dispatch
mode. A run of elementwise operations and reductions of a compiled function then counts as one
kernel: it reads what was made before the run, once, and writes what is still there at its end.
Inductor may fuse more than such a run, and recomputes what autograd keeps here; it fuses less where
a reduction's result is spread again over what it reduced.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

FUSED = "fused"
"""The name of such a kernel."""

Emit = Callable[[float], None]
"""Count a kernel that moves so many bytes."""


class Fusion:
    """The run that is open."""

    def __init__(self) -> None:
        self._place: Any = None
        self._emit: Emit | None = None
        # By storage. The references keep an address from being another storage's.
        self._read: dict[int, tuple[StorageWeakRef, float]] = {}
        self._made: dict[int, tuple[StorageWeakRef, float]] = {}
        self._changed: dict[int, float] = {}

    def add(self, place: Any, tensors: list[Tensor], outputs: list[Tensor], emit: Emit) -> None:
        """An operation at `place`; `emit` is called at the end of its run."""
        if place != self._place:
            self.close()
            self._place, self._emit = place, emit
        for x in tensors:
            if (key := _key(x)) not in self._made and key not in self._read:
                self._read[key] = StorageWeakRef(x.untyped_storage()), _bytes(x)
        for x in outputs:
            key = _key(x)
            if key in self._read:
                self._changed[key] = _bytes(x)
            elif key not in self._made:
                self._made[key] = StorageWeakRef(x.untyped_storage()), _bytes(x)

    def close(self) -> None:
        """End the run, if there is one."""
        if self._emit is None:
            return
        written = sum(size for storage, size in self._made.values() if not storage.expired())
        read = sum(size for _, size in self._read.values())
        emit, moved = self._emit, read + written + sum(self._changed.values())
        self.__init__()  # type: ignore[misc]
        emit(moved)


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _bytes(x: Tensor) -> float:
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
