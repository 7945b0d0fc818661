"""Memory that a rank and a process of its own both see."""

import mmap
import os
import sys
import tempfile
import threading
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

# MADV_POPULATE_WRITE of Linux 5.14, which the module mmap does not name.
_POPULATE_WRITE = 23
_PIECE = 2**22  # Bytes. Python's lock is held while they are mapped: a millisecond or two.


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
        mapped = mmap.mmap(self.handle, self.size)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._pinned = pinned
        # Mapped one by one in the first copy, pages take longer than the copy itself.
        self._mapper = threading.Thread(target=_map_pages, args=(mapped,), daemon=True)
        if sys.platform == "linux" and not pinned:
            self._mapper.start()
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


def _map_pages(mapped: mmap.mmap) -> None:
    with suppress(OSError):  # An older Linux.
        for start in range(0, len(mapped), _PIECE):
            mapped.madvise(_POPULATE_WRITE, start, min(_PIECE, len(mapped) - start))
