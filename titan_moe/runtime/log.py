"""Prints lines on stdout from chosen ranks, and outlives readers that leave before the end."""

import io
import logging
import os
import select
import sys
from typing import Any

logger = logging.getLogger("titan_moe")


class _Lasting(io.FileIO):
    """A stream that drops its text once the reader has left."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def outlive_readers() -> None:
    """Let this process go on when the reader of its output leaves, as `head` does."""
    raw_out, raw_err = (_Lasting(number, "w", closefd=False) for number in (1, 2))
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw_out), line_buffering=raw_out.isatty())
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(raw_err), errors="backslashreplace", line_buffering=True
    )


def reader_has_left() -> bool:
    """Returns whether output goes into a closed pipe; it is dropped from then on."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)  # Closed ends report themselves.
    left = [number for number, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for number in left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return bool(left)


def progress(*iterable: Any, **options: Any) -> Any:
    """Returns tqdm's bar. Without a terminal it prints a line every 10 seconds at most, the first
    after 10."""
    from tqdm import tqdm

    class Lines(tqdm):  # type: ignore[type-arg]
        @staticmethod
        def status_printer(file: Any) -> Any:
            return lambda text: print(text.strip(), file=file, flush=True) if text.strip() else None

    shown = sys.stderr.isatty()
    look: Any = {"dynamic_ncols": True} if shown else {"ncols": 80, "mininterval": 10, "delay": 10}
    kind: Any = tqdm if shown else Lines
    return kind(*iterable, **look, **options)


def log_on_rank_zero(line: str, *values: object) -> None:
    """Log a line once for all ranks of the process group."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        logger.info(line, *values)


def start_logging(rank: int, ranks: set[int]) -> None:
    """Print the logger's lines if `rank` is among `ranks`: `17:46:43 rank 1 message`."""
    logger.handlers.clear()
    logger.propagate = False
    if rank not in ranks:
        logger.setLevel(logging.CRITICAL + 1)
        return
    handler = logging.StreamHandler(sys.stdout)
    name = f"rank {rank} " if len(ranks) > 1 else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name}%(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
