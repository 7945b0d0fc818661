"""Bytes of the tensors that live while a program runs."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


class LiveBytes(TorchDispatchMode):
    """Counts floating storages that operations read or made, after each operation; what a kernel
    or a backend takes for itself is not seen. `peak` is the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten(args)
        if func.namespace == "c10d":
            # Copies, since gloo's threads hold the tensors of a collective for a while after it.
            copies = [each.clone() if isinstance(each, Tensor) else each for each in leaves]
            result = func(*tree_unflatten(copies, spec))
            tree_leaves(result)[-1].wait()
            for each, copy in zip(leaves, copies, strict=True):
                if isinstance(each, Tensor):
                    each.copy_(copy)
        else:
            result = func(*args, **(kwargs or {}))
            leaves += tree_leaves(result)
        for each in leaves:
            if isinstance(each, Tensor) and each.is_floating_point():
                storage = each.untyped_storage()
                self._storages[StorageWeakRef(storage)] = storage.nbytes()
        self._storages = {ref: n for ref, n in self._storages.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._storages.values()))
        return result
