"""Ranks fail together: an error on one rank becomes the same error on all of them.

Without this, a rank whose disk is full raises while the others wait for it in the next collective.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from titan_moe.comm.process import backend_timeout
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError, disk_remedy, is_outside

T = TypeVar("T")
_groups: WeakKeyDictionary[Any, dict[str, ProcessGroup]] = WeakKeyDictionary()

_LONGEST_REASON = 300
_LONGEST_WAIT_S = 30 * 60


def control_group(use: str = "waits for files") -> ProcessGroup:
    """The gloo group of all ranks for one use, made at its first call; collective.

    Ranks wait here for one another's files: half an hour, or what `process.set_timeout` says,
    however long the groups that train wait (comm.train_timeout_seconds). It ends with the world:
    Python's end may abort where a thread of a group is left.
    """
    world = dist.group.WORLD
    groups = _groups.setdefault(world, {})
    if use not in groups:
        # None, the world's own, where that has no gloo: in a fake world.
        backend = "gloo" if "gloo" in dist.get_backend_config(world) else None
        timeout = backend_timeout(_LONGEST_WAIT_S)
        group: Any = dist.new_group(None, timeout, backend, group_desc=use)
        groups[use] = group
    return groups[use]


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
    dist.all_gather_object(found, (result, error), group=control_group())
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
    dist.broadcast_object_list(outcome, src=0, group=control_group())
    result, error = outcome
    if error is not None:
        raise error from attempt[2]
    return cast(T, result)


def lowest(value: int) -> int:
    """The lowest of all ranks' values; collective, between their hosts."""
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=control_group())
    return int(found)


def _attempt(
    action: Callable[[], T], doing: str
) -> tuple[T | None, Exception | None, Exception | None]:
    """Returns the action's result, or the error for all ranks and the one that was raised."""
    try:
        return action(), None, None
    except Exception as error:
        return None, for_all_ranks(error, doing), error


def for_all_ranks(error: BaseException, doing: str) -> Exception:
    """Returns the error that all ranks raise for one rank's `error`, as `on_every_rank` says."""
    if isinstance(error, ConfigError):
        return RunError("; ".join(error.lines))
    kind = RunError if isinstance(error, RunError) or is_outside(error) else RuntimeError
    line = str(error) if isinstance(error, RunError) else f"{doing}: {_reason(error)}"
    return kind(line)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f" ({error.filename})" if error.filename else ""
        remedy = disk_remedy(error)
        return f"{error.strerror}{place}{remedy and '; '}{remedy}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_REASON]
