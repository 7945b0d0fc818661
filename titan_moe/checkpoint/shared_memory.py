"""Memory that a rank and a process of its own both see."""

import mmap
import os
import sys
import tempfile
from math import prod

import torch
from torch import Tensor


class SharedMemory:
    """`size` bytes. They have no name, so that nothing is left when both processes are killed, and
    are no file of /dev/shm, which is small in containers."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        """`pinned`: page-locked, for copies from the current GPU."""
        if sys.platform == "linux":
            self.handle = os.memfd_create("checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                self.handle = os.dup(file.fileno())
        self.size = max(size, 1)
        os.ftruncate(self.handle, self.size)
        self._bytes = torch.frombuffer(mmap.mmap(self.handle, self.size), dtype=torch.uint8)
        self._pinned = pinned
        if pinned:
            register = torch.cuda.cudart().cudaHostRegister
            torch.cuda.check_error(int(register(self._bytes.data_ptr(), self.size, 0)))

    def view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in it. `start`: in bytes, a multiple of the elements' size."""
        stop = start + prod(shape) * dtype.itemsize
        return self._bytes[start:stop].view(dtype).view(shape)

    def close(self) -> None:
        """Give it back, once no tensor of it is in use."""
        if self._pinned:
            torch.cuda.check_error(
                int(torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr()))
            )
            self._pinned = False
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
        self._bytes = self._bytes.new_empty(0)
