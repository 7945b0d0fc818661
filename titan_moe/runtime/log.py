"""Lines on stdout, from the ranks that were asked for."""

import logging
import sys

logger = logging.getLogger("titan_moe")

_GREY, _YELLOW, _RED, _PLAIN = "\033[90m", "\033[33m", "\033[31m", "\033[0m"


def start_logging(rank: int, ranks: set[int], *, color: bool = True) -> None:
    """Print the logger's lines if `rank` is among `ranks`; colours need a terminal as well."""
    logger.handlers.clear()
    logger.propagate = False
    if rank not in ranks:
        logger.addHandler(logging.NullHandler())
        logger.setLevel(logging.CRITICAL + 1)
        return
    handler = logging.StreamHandler(sys.stdout)
    name = f"rank {rank} " if len(ranks) > 1 else ""
    handler.setFormatter(_Formatter(name, color=color and sys.stdout.isatty()))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


class _Formatter(logging.Formatter):
    """`17:46:43 rank 1 message`, the prefix in the level's colour."""

    def __init__(self, name: str, *, color: bool) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._name = name
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"{self.formatTime(record, self.datefmt)} {self._name}"
        if self._color:
            color = _GREY if record.levelno < logging.WARNING else _YELLOW
            color = _RED if record.levelno >= logging.ERROR else color
            prefix = f"{color}{prefix}{_PLAIN}"
        return prefix + record.getMessage()
