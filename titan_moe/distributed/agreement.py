"""Ranks fail together: an error on one rank becomes the same RunError on all of them.

Without this, a rank whose disk is full raises while the others wait for it in the next collective.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError, disk_remedy
from titan_moe.runtime.process import backend_timeout

T = TypeVar("T")
_waiting: WeakKeyDictionary[Any, dict[int, ProcessGroup]] = WeakKeyDictionary()

_LONGEST_REASON = 300
_limit_s = 30 * 60


def set_longest_wait(seconds: int) -> None:
    """Set how long a rank waits for another's files from now on; alike on all ranks."""
    global _limit_s
    _limit_s = seconds


def on_every_rank(action: Callable[[], T], *, doing: str) -> T:
    """Run `action` on every rank and return its result; collective.

    Raises RunError(f"{doing}: {reason}") on all ranks when any rank's action raised; a RunError
    raised inside `action` keeps its own words. The lowest failing rank gives the reason.
    """
    result, error = _attempt(action, doing)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error, group=_waiting_group(dist.group.WORLD, _limit_s))
    for first in errors:
        if first is not None:
            raise RunError(first)
    return cast(T, result)


def on_rank_zero(action: Callable[[], T], *, doing: str) -> T:
    """Run `action` on rank 0 alone and return its (picklable) result on every rank; collective.

    Raises as `on_every_rank` does.
    """
    outcome: list[Any] = list(_attempt(action, doing)) if dist.get_rank() == 0 else [None, None]
    dist.broadcast_object_list(outcome, src=0, group=_waiting_group(dist.group.WORLD, _limit_s))
    result, error = outcome
    if error is not None:
        raise RunError(error)
    return cast(T, result)


def lowest(value: int) -> int:
    """The lowest of all ranks' values; collective, between their hosts."""
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=_waiting_group(dist.group.WORLD, _limit_s))
    return int(found)


def _waiting_group(world: ProcessGroup | None, seconds: int) -> ProcessGroup:
    """All ranks, who wait here so long for one another's files, however long the groups that train
    wait (comm.train_timeout_seconds). It ends with the world: Python's end may abort where a thread
    of a group is left."""
    groups = _waiting.setdefault(world, {})
    if seconds not in groups:
        timeout = backend_timeout(seconds)
        # None, the world's own, where that has no gloo: in a fake world.
        backend = "gloo" if "gloo" in dist.get_backend_config(world) else None
        groups[seconds] = dist.new_group(
            backend=backend, timeout=timeout, group_desc="waits for files"
        )
    return groups[seconds]


def _attempt(action: Callable[[], T], doing: str) -> tuple[T | None, str | None]:
    try:
        return action(), None
    except (Exception, CheckpointException) as error:  # The latter is a BaseException only.
        cause = _cause(error)
        if isinstance(cause, ConfigError):
            return None, "; ".join(cause.lines)
        return None, str(cause) if isinstance(cause, RunError) else f"{doing}: {_reason(cause)}"


def _cause(error: BaseException) -> BaseException:
    """Of the failures that DCP collects over ranks, the lowest rank's."""
    while isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    return error


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f" ({error.filename})" if error.filename else ""
        remedy = disk_remedy(error)
        return f"{error.strerror}{place}{remedy and '; '}{remedy}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_REASON]
