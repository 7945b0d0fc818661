"""A thread per rank that notices when a collective waits past its limit, tells all ranks through
the store, gathers what each is doing, and ends the run with one report.

The store is that through which the ranks met: it works while no collective does. A rank that does
not answer (stopped, killed, or inside a call that holds Python's lock) is named as silent.

Private torch API stands here alone: the flight recorders' dumps, the table of process groups and
the default store. torch 2.13 records on gloo too, apart from sends and receives; without a recorder
a record has no calls.
"""

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from titan_moe.comm.process import BACKEND_GRACE_S, Process
from titan_moe.config.job_config import Comm
from titan_moe.debug.hang_report import analyse
from titan_moe.runtime.errors import report
from titan_moe.runtime.files import write_whole
from titan_moe.runtime.position import POSITION, Move, at

logger = logging.getLogger(__name__)

_ASKED, _LINES = "hang/asked", "hang/lines"
_ANSWER_S = 10.0
"""Longest wait for other ranks' records."""
_LONGEST_SILENCE_S = 30 * 60
"""Longest time without a sign of life in a phase of a step, if no save may take longer."""


class HangWatch:
    """Watches while its block runs; the process ends with exit code 1 after a report. One rank
    alone waits for no other, and is not watched.

    Args:
        save_limit: checkpoint.save_timeout_seconds.
        folder: of the reports.
        failures: where a rank's failure is recorded for the launcher; None prints it.
    """

    def __init__(
        self, process: Process, comm: Comm, save_limit: int, folder: Path, failures: Path | None
    ) -> None:
        self._rank, self._world_size = process.rank, process.world_size
        self._folder, self._failures = folder, failures
        # A save that is awaited in the background says itself that it has taken too long.
        self._longest_silence = max(_LONGEST_SILENCE_S, save_limit + BACKEND_GRACE_S)
        self._limit = min(comm.init_timeout_seconds, comm.train_timeout_seconds, save_limit)
        self._error: BaseException | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch for hangs", daemon=True)

    def __enter__(self) -> None:
        if self._world_size > 1:
            # Another connection to the ranks' store: the main thread may be waiting on its own.
            self._store = _get_default_store().clone()  # type: ignore[attr-defined]
            self._store.set_timeout(timedelta(seconds=30))
            self._thread.start()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Report what a collective raised, or end the thread, which uses the store, before the
        process group ends."""
        if self._world_size == 1:
            return
        # Gloo raises RuntimeErrors that name its files.
        by_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
        if by_gloo or isinstance(error, dist.DistError):
            traceback.print_exception(error)
            self._error = error
        self._wake.set()
        self._thread.join(3 * _ANSWER_S)

    def _run(self) -> None:
        try:
            while not (self._error or self._waits_too_long() or self._store.check([_ASKED])):
                if self._wake.wait(min(max(self._limit / 20, 0.1), 5.0)) and not self._error:
                    return
            lines, is_writer = self._gather()
        except (dist.DistError, RuntimeError, OSError):
            if self._error or not self._wake.is_set():
                logger.exception("rank %d: the watch for hangs has ended", self._rank)
            return
        if self._failures or is_writer:
            report(self._rank, lines, 1, expected=True, to=self._failures)
        sys.stdout.flush()
        sys.stderr.flush()
        # The main thread is inside a call that nothing ends.
        os._exit(1)

    def _waits_too_long(self) -> bool:
        now = time.time_ns()
        quiet = (now - POSITION.last().time_ns) / 1e9
        if quiet < self._limit:
            return False  # Before the recorder is read, which takes a tenth of a second.
        if quiet > self._longest_silence and POSITION.last().phase != "start":
            return True
        return any(
            now - entry["time_created_ns"] > entry["timeout_ms"] * 1e6 - BACKEND_GRACE_S * 1e9
            for entry in _recorded()
            # torch leaves sends and receives that it joined "scheduled" for good.
            if not entry["is_p2p"] and not _has_ended(entry)
        )

    def _gather(self) -> tuple[list[str], bool]:
        """Returns the report's lines, and whether this rank wrote them."""
        self._store.set(_ASKED, str(self._rank))
        keys = [f"hang/rank-{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], json.dumps(make_record(self._rank, self._error)))
        _wait_until(lambda: self._store.check(keys), _ANSWER_S)
        present = [rank for rank, key in enumerate(keys) if self._store.check([key])]
        if present[0] != self._rank and _wait_until(lambda: self._store.check([_LINES]), _ANSWER_S):
            return json.loads(self._store.get(_LINES)), False
        records = [json.loads(self._store.get(keys[rank])) for rank in present]
        first, *more = analyse(records, self._world_size)
        lines = [f"{first} (docs/troubleshooting.md#hang-or-timeout)", *more]
        try:
            path = self._folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.json"
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"world_size": self._world_size, "records": records}))
            lines.append(f"every rank's calls and stacks: titan-moe report hang {path}")
        except OSError as error:
            lines.append(f"cannot write a report into {self._folder}: {error.strerror}")
        self._store.set(_LINES, json.dumps(lines))
        return lines, True


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met


_CALLS_KEPT = 16
"""Latest calls of a process group in a record, besides those that have not ended."""
_FRAMES_KEPT = 40
_ABOVE = f"{Path(__file__).parents[2]}/"


def make_record(rank: int, error: BaseException | None = None) -> dict[str, Any]:
    """Returns the state of this process, now. `error`: raised by a collective, if one was."""
    now, moves = time.time_ns(), POSITION.moves()
    last, frames = moves[-1], sys._current_frames().items()
    stacks = {ident: _frames(traceback.extract_stack(frame)) for ident, frame in frames}
    main = stacks.pop(threading.main_thread().ident or 0, [])
    names = {thread.ident: thread.name for thread in threading.enumerate()}
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
        "stack": main if error is None else _frames(traceback.extract_tb(error.__traceback__)),
        "threads": {
            f"{names.get(ident, 'a thread of torch')} ({ident})": stack
            for ident, stack in stacks.items()
            if ident != threading.get_ident()
        },
    }


def _groups(now: int, moves: list[Move]) -> list[dict[str, Any]]:
    """Returns the last calls of each process group of several ranks. Each library counts its own
    calls: two of one group are compared as two groups."""
    entries = defaultdict(list)
    for entry in sorted(_recorded(), key=lambda entry: entry["record_id"]):
        if not entry["is_p2p"]:
            library = entry["profiling_name"].partition(":")[0]
            entries[entry["process_group"][0], library].append(entry)
    by_name = {name: group for group, name in _world.pg_names.items()}
    groups = []
    for (name, library), calls in entries.items():
        group = by_name.get(name)
        if group is None or len(ranks := dist.get_process_group_ranks(group)) < 2:
            continue
        axes = "world" if group is dist.group.WORLD else group.group_desc
        kept = [call for call in calls[:-_CALLS_KEPT] if not _has_ended(call)]
        kept += calls[-_CALLS_KEPT:]
        calls = [_call(each, now, moves) for each in kept]
        groups.append({"name": f"{name} {library}", "axes": axes, "ranks": ranks, "calls": calls})
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
    """Returns the entries of torch's two flight recorders: NCCL has its own, and a build without
    NCCL only the other."""
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    dumps = [dump for name in names if (dump := getattr(c10d, name, None)) is not None]
    return [e for dump in dumps for e in json.loads(dump(True, False)).get("entries", [])]


def _has_ended(entry: dict[str, Any]) -> bool:
    """Tells whether a call has ended. Gloo's entries stay "scheduled", but retire at the end."""
    return entry["retired"] or entry["state"] == "completed"


def _frames(frames: traceback.StackSummary) -> list[str]:
    """Returns lines such as "titan_moe/data/loader.py:52 in next_step", the innermost last."""
    return [
        f"{frame.filename.removeprefix(_ABOVE)}:{frame.lineno} in {frame.name}"
        for frame in frames[-_FRAMES_KEPT:]
    ]
