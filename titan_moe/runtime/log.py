"""Lines on stdout, from the ranks that were asked for."""

import logging
import sys

logger = logging.getLogger("titan_moe")


def start_logging(rank: int, ranks: set[int]) -> None:
    """Print the logger's lines if `rank` is among `ranks`: `17:46:43 rank 1 message`."""
    logger.handlers.clear()
    logger.propagate = False
    if rank not in ranks:
        logger.addHandler(logging.NullHandler())
        logger.setLevel(logging.CRITICAL + 1)
        return
    handler = logging.StreamHandler(sys.stdout)
    name = f"rank {rank} " if len(ranks) > 1 else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name}%(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
