"""A progress bar in bytes, on the main rank's terminal; and the line that ends it."""

import time

import torch.distributed as dist
from tqdm import tqdm


class Progress:
    """A bar from 0 to `total` bytes of this rank's own work.

    Shown by rank 0 only, and not where nobody would see it move.
    """

    def __init__(self, what: str, total: int) -> None:
        self._bar = tqdm(
            desc=what,
            total=total,
            unit="B",
            unit_scale=True,
            dynamic_ncols=True,
            leave=False,
            # None: off where the output is no terminal.
            disable=None if not dist.is_initialized() or dist.get_rank() == 0 else True,
        )

    def advance(self, num_bytes: int) -> None:
        """More bytes are done."""
        self._bar.update(num_bytes)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


def speed_line(what: str, num_bytes: int, started: float) -> str:
    """What an import or export ends with. `started`: a perf_counter's."""
    seconds = time.perf_counter() - started
    gigabytes = num_bytes / 1e9
    return f"{what}: {gigabytes:.2f} GB in {seconds:.1f} s, {gigabytes / seconds:.2f} GB/s"
