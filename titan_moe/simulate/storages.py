"""Counts the bytes of all tensors that are alive, at torch's dispatcher, while a program runs."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_RESIZE = torch.UntypedStorage.resize_


class StorageCounter(TorchDispatchMode):
    """Keeps the bytes of the storages that operations have made and that are still alive, and the
    most that there were at once; changes nothing.

    Enter it before the model is made, and after a mode that makes tensors fake, whose storages have
    a size and no memory. What a kernel allocates for itself is not seen. FSDP frees and fills
    storages by their size, without an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.alive = self.most = 0
        """Bytes. `most` may be set back."""

    def __enter__(self) -> "StorageCounter":
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = _RESIZE(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = _RESIZE  # type: ignore[method-assign]
        super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again, with its local tensors.
        result = func(*args, **(kwargs or {}))
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return result  # DTensor learns shapes.
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                device = x.fake_device if isinstance(x, FakeTensor) else x.device
                if device.type != "meta":
                    self._see(x.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key).atexit = False
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.alive += size - self._sizes[key]
        self._sizes[key] = size
        self.most = max(self.most, self.alive)

    def _forget(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)
