"""Ranks fail together: an error on one rank becomes the same error on all of them.

Without this, a rank whose disk is full raises while the others wait for it in the next collective.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError, disk_remedy, is_outside
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

    When any rank's action raised, all ranks raise what the lowest failing rank says: RunError with
    its line for a RunError or ConfigError, RunError(f"{doing}: {reason}") where memory, a disk or
    the network failed, and RuntimeError, with the traceback where it was raised, for all else.
    """
    kept: list[T] = []
    from_every_rank(lambda: kept.append(action()), doing=doing)
    return kept[0]


def from_every_rank(action: Callable[[], T], *, doing: str) -> list[T]:
    """Run `action` on every rank and return all ranks' (picklable) results; collective.

    Raises as `on_every_rank` does.
    """
    result, error, cause = _attempt(action, doing)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (result, error), group=_waiting_group(dist.group.WORLD))
    for _, first in found:
        if first is not None:
            raise first from cause
    return [each for each, _ in found]


def on_rank_zero(action: Callable[[], T], *, doing: str) -> T:
    """Run `action` on rank 0 alone and return its (picklable) result on every rank; collective.

    Raises as `on_every_rank` does.
    """
    attempt = _attempt(action, doing) if dist.get_rank() == 0 else (None, None, None)
    outcome: list[Any] = [*attempt[:2]]
    dist.broadcast_object_list(outcome, src=0, group=_waiting_group(dist.group.WORLD))
    result, error = outcome
    if error is not None:
        raise error from attempt[2]
    return cast(T, result)


def lowest(value: int) -> int:
    """The lowest of all ranks' values; collective, between their hosts."""
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=_waiting_group(dist.group.WORLD))
    return int(found)


def _waiting_group(world: ProcessGroup | None) -> ProcessGroup:
    """All ranks, who wait here for one another's files: `_limit_s`, however long the groups that
    train wait (comm.train_timeout_seconds). It ends with the world: Python's end may abort where a
    thread of a group is left."""
    groups, timeout = _waiting.setdefault(world, {}), backend_timeout(_limit_s)
    if _limit_s not in groups:
        # None, the world's own, where that has no gloo: in a fake world.
        backend = "gloo" if "gloo" in dist.get_backend_config(world) else None
        groups[_limit_s] = dist.new_group(None, timeout, backend, group_desc="waits for files")
    return groups[_limit_s]


def _attempt(
    action: Callable[[], T], doing: str
) -> tuple[T | None, Exception | None, Exception | None]:
    """Returns the action's result, or the error for all ranks and the one that was raised."""
    try:
        return action(), None, None
    except ConfigError as error:
        return None, RunError("; ".join(error.lines)), error
    except Exception as error:
        kind = RunError if isinstance(error, RunError) or is_outside(error) else RuntimeError
        line = str(error) if isinstance(error, RunError) else f"{doing}: {_reason(error)}"
        return None, kind(line), error


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f" ({error.filename})" if error.filename else ""
        remedy = disk_remedy(error)
        return f"{error.strerror}{place}{remedy and '; '}{remedy}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_REASON]
