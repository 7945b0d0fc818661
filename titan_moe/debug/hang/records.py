"""What one rank tells of itself when a run hangs, as JSON: its position, its last collectives in
every process group, and the Python stacks of its threads.

Private torch API stands here alone: the flight recorder's dump, the table of process groups and
the default store. torch 2.13 records on gloo too, apart from sends and receives; without a recorder
a record has no calls.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from titan_moe.runtime.position import POSITION, Move, at

_CALLS_KEPT = 16
"""The last of a process group, besides those that have not ended."""
_FRAMES_KEPT = 40
_PACKAGE = Path(__file__).parents[2]


def default_store() -> dist.Store:
    """The store through which the ranks met, on a connection of its own: the main thread may be
    waiting on its."""
    store = _get_default_store()
    return store.clone()  # type: ignore[attr-defined]


def seconds_waited(now_ns: int) -> list[tuple[float, float]]:
    """For each collective that has not ended: how long ago it was called, and its time limit."""
    return [
        ((now_ns - entry["time_created_ns"]) / 1e9, entry["timeout_ms"] / 1e3)
        for entry in _recorded()
        if not _has_ended(entry)
    ]


def num_recorded() -> int:
    """How many collectives the recorder has seen since the process began."""
    return max((entry["record_id"] + 1 for entry in _recorded()), default=0)


def make_record(rank: int, error: BaseException | None = None) -> dict[str, Any]:
    """Of this process, now; `error`: what a collective raised, if one did."""
    now, moves = time.time_ns(), POSITION.moves()
    last = moves[-1]
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "step": last.step,
        "phase": last.phase,
        "place": last.words(),
        "seconds_there": round((now - last.time_ns) / 1e9, 1),
        "error": "" if error is None else next(iter(str(error).splitlines()), ""),
        "groups": _groups(now, moves),
        "stack": _main_stack() if error is None else _frames(traceback.extract_tb(_trace(error))),
        "threads": _other_stacks(),
    }


def _groups(now: int, moves: list[Move]) -> list[dict[str, Any]]:
    """Every process group of this rank with more than one member, and its last calls."""
    entries = defaultdict(list)
    for entry in _recorded():
        if not entry["is_p2p"]:
            entries[entry["process_group"][0]].append(entry)
    groups = []
    for group, name in _world.pg_names.items():
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) < 2:
            continue
        calls = sorted(entries[name], key=lambda entry: entry["record_id"])
        kept = [call for call in calls[:-_CALLS_KEPT] if not _has_ended(call)]
        kept += calls[-_CALLS_KEPT:]
        axes = "world" if group is dist.group.WORLD else group.group_desc
        calls = [_call(each, now, moves) for each in kept]
        groups.append({"name": name, "axes": axes, "ranks": ranks, "calls": calls})
    return groups


def _call(entry: dict[str, Any], now: int, moves: list[Move]) -> dict[str, Any]:
    move = at(moves, entry["time_created_ns"])
    return {
        "number": entry["collective_seq_id"],
        "operation": entry["profiling_name"].partition(":")[2],
        "sizes": [entry["input_sizes"], entry["output_sizes"]],
        "dtypes": entry["input_dtypes"],
        "seconds_ago": round((now - entry["time_created_ns"]) / 1e9, 3),
        "timeout_s": entry["timeout_ms"] / 1e3,
        "ended": _has_ended(entry),
        "step": 0 if move is None else move.step,
        "place": "" if move is None else move.words(),
    }


def _recorded() -> list[dict[str, Any]]:
    """The flight recorder's entries; none where this torch has none, or where it is off."""
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(
        c10d, "_dump_nccl_trace_json", None
    )
    return [] if dump is None else json.loads(dump(True, False)).get("entries", [])


def _has_ended(entry: dict[str, Any]) -> bool:
    """Gloo's entries stay "scheduled" for ever, but retire when their work has ended."""
    return entry["retired"] or entry["state"] == "completed"


def _trace(error: BaseException) -> Any:
    return error.__traceback__


def _main_stack() -> list[str]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _stack(frame)


def _other_stacks() -> dict[str, list[str]]:
    """Autograd's threads and the loader's among them; not that of this call."""
    own = {threading.main_thread().ident, threading.get_ident()}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'a thread of torch')} ({ident})": _stack(frame)
        for ident, frame in sys._current_frames().items()
        if ident not in own
    }


def _stack(frame: FrameType | None) -> list[str]:
    return [] if frame is None else _frames(traceback.extract_stack(frame))


def _frames(frames: traceback.StackSummary) -> list[str]:
    """Such as "titan_moe/data/loader.py:52 in next_step", the innermost last."""
    return [
        f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"
        for frame in frames[-_FRAMES_KEPT:]
    ]


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(_PACKAGE.parent)) if path.is_relative_to(_PACKAGE) else file
