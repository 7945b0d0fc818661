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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store, _world

from titan_moe.config.job_config import Comm
from titan_moe.debug.hang_report import analyse, write_report
from titan_moe.models.decoder import Decoder
from titan_moe.runtime.errors import report
from titan_moe.runtime.position import POSITION, Move, at
from titan_moe.runtime.process import BACKEND_GRACE_S, Process

logger = logging.getLogger(__name__)

_ASKED, _LINES = "hang/asked", "hang/lines"
_ANSWER_S = 10.0
"""Longest wait for other ranks' records."""
_LONGEST_SILENCE_S = 30 * 60
"""Longest time without a sign of life in a phase of a step, if no save may take longer."""
_STORE_LIMIT = timedelta(seconds=30)


@contextmanager
def watch_for_hangs(
    process: Process, comm: Comm, save_limit: int, folder: Path, failures: Path | None
) -> Iterator[None]:
    """Watch while the block runs; the process ends with exit code 1 after a report.

    `save_limit`: checkpoint.save_timeout_seconds. `folder`: of the reports. `failures`: where a
    rank's failure is recorded for the launcher; None prints it. One rank alone waits for no other,
    and is not watched.
    """
    if process.world_size == 1:
        yield
        return
    watch = HangWatch(process, comm, save_limit, folder, failures)
    watch.start()
    try:
        yield
    except Exception as error:
        if _is_of_a_collective(error):
            traceback.print_exc()
            watch.report(error)
        raise
    finally:
        watch.stop()


class HangWatch:
    """The thread of one rank."""

    def __init__(
        self, process: Process, comm: Comm, save_limit: int, folder: Path, failures: Path | None
    ) -> None:
        self._rank, self._world_size = process.rank, process.world_size
        self._folder, self._failures = folder, failures
        # A save that is awaited in the background says itself that it has taken too long.
        self._longest_silence = max(_LONGEST_SILENCE_S, save_limit + BACKEND_GRACE_S)
        self._limit = min(comm.init_timeout_seconds, comm.train_timeout_seconds, save_limit)
        self._period = min(max(self._limit / 20, 0.1), 5.0)
        self._store = _default_store()
        self._store.set_timeout(_STORE_LIMIT)
        self._error: BaseException | None = None
        self._wake = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="watch for hangs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which uses the store, before the process group ends."""
        self._ended = True
        self._wake.set()
        self._thread.join(2 * _ANSWER_S)

    def report(self, error: BaseException) -> None:
        """Report what a collective raised; returns only if the report fails."""
        self._error = error
        self._wake.set()
        self._thread.join(3 * _ANSWER_S)

    def _run(self) -> None:
        try:
            while self._error is None:
                self._wake.wait(self._period)
                if self._ended:
                    return
                if self._error is not None or self._waits_too_long() or self._is_asked():
                    break
            lines, is_writer = self._gather()
        except (dist.DistError, RuntimeError, OSError):
            if not self._ended:
                logger.exception("rank %d: the watch for hangs has ended", self._rank)
            return
        if self._failures or is_writer:
            report(self._rank, lines, 1, expected=True, to=self._failures)
        sys.stdout.flush()
        sys.stderr.flush()
        # The main thread is inside a call that nothing ends.
        os._exit(1)

    def _is_asked(self) -> bool:
        return self._store.check([_ASKED])

    def _waits_too_long(self) -> bool:
        now = time.time_ns()
        quiet = (now - POSITION.last().time_ns) / 1e9
        if quiet < self._limit:
            return False  # Before the recorder is read, which takes a tenth of a second.
        if quiet > self._longest_silence and POSITION.last().phase != "start":
            return True
        return any(age > limit - BACKEND_GRACE_S for age, limit in seconds_waited(now))

    def _gather(self) -> tuple[list[str], bool]:
        """Returns the report's lines, and whether this rank wrote them."""
        self._store.set(_ASKED, str(self._rank))
        own = make_record(self._rank, self._error)
        self._store.set(self._key(self._rank), json.dumps(own))
        keys = [self._key(rank) for rank in range(self._world_size)]
        _wait_until(lambda: self._store.check(keys), _ANSWER_S)
        present = [rank for rank, key in enumerate(keys) if self._store.check([key])]
        if present[0] != self._rank and _wait_until(lambda: self._store.check([_LINES]), _ANSWER_S):
            return json.loads(self._store.get(_LINES)), False
        records = [json.loads(self._store.get(keys[rank])) for rank in present]
        lines = self._write(records)
        self._store.set(_LINES, json.dumps(lines))
        return lines, True

    def _write(self, records: list[dict[str, Any]]) -> list[str]:
        first, *more = analyse(records, self._world_size)
        lines = [f"{first} (docs/troubleshooting.md#hang-or-timeout)", *more]
        try:
            path = write_report(self._folder, self._world_size, records)
        except OSError as error:
            return [*lines, f"cannot write a report into {self._folder}: {error.strerror}"]
        return [*lines, f"every rank's calls and stacks: titan-moe report hang {path}"]

    def _key(self, rank: int) -> str:
        return f"hang/rank-{rank}"


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met


def _is_of_a_collective(error: Exception) -> bool:
    """Gloo raises RuntimeErrors that name its files."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


_CALLS_KEPT = 16
"""Latest calls of a process group in a record, besides those that have not ended."""
_FRAMES_KEPT = 40
_PACKAGE = Path(__file__).parents[1]


def _default_store() -> dist.Store:
    """Returns the ranks' store on another connection: the main thread may be waiting on its own."""
    store = _get_default_store()
    return store.clone()  # type: ignore[attr-defined]


def seconds_waited(now_ns: int) -> list[tuple[float, float]]:
    """Returns how long ago each collective that has not ended was called, and its time limit."""
    return [
        ((now_ns - entry["time_created_ns"]) / 1e9, entry["timeout_ms"] / 1e3)
        for entry in _recorded()
        if not _has_ended(entry)
    ]


def make_record(rank: int, error: BaseException | None = None) -> dict[str, Any]:
    """Returns the state of this process, now. `error`: raised by a collective, if one was."""
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
        "stack": _main_stack()
        if error is None
        else _frames(traceback.extract_tb(error.__traceback__)),
        "threads": _other_stacks(),
    }


def _groups(now: int, moves: list[Move]) -> list[dict[str, Any]]:
    """Returns each process group of this rank with more than one member, and its last calls."""
    entries = defaultdict(list)
    for entry in _recorded():
        if not entry["is_p2p"]:
            library = entry["profiling_name"].partition(":")[0]
            entries[entry["process_group"][0], library].append(entry)
    groups = []
    for group, name in _world.pg_names.items():
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) < 2:
            continue
        axes = "world" if group is dist.group.WORLD else group.group_desc
        # A library counts its own calls: two of one group are compared as two groups.
        libraries = [library for of, library in entries if of == name] or [""]
        for library in libraries:
            calls = sorted(entries[name, library], key=lambda entry: entry["record_id"])
            kept = [call for call in calls[:-_CALLS_KEPT] if not _has_ended(call)]
            kept += calls[-_CALLS_KEPT:]
            calls = [_call(each, now, moves) for each in kept]
            key = f"{name} {library}".rstrip()
            groups.append({"name": key, "axes": axes, "ranks": ranks, "calls": calls})
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


def _main_stack() -> list[str]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _stack(frame)


def _other_stacks() -> dict[str, list[str]]:
    """Returns the stacks of all threads but this one and the main one."""
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
    """Returns lines such as "titan_moe/data/loader.py:52 in next_step", the innermost last."""
    return [
        f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"
        for frame in frames[-_FRAMES_KEPT:]
    ]


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(_PACKAGE.parent)) if path.is_relative_to(_PACKAGE) else file


def mark_layers(parts: Iterable[nn.Module]) -> None:
    """Let the blocks of decoders tell POSITION when a rank enters and leaves them, forward and
    backward. Changes no value."""
    for part in parts:
        assert isinstance(part, Decoder)
        for name, block in part.blocks().items():
            words = name.replace(".block", "").replace("layers.", "layer ").replace(".", " ")
            # First of the block's hooks: what FSDP gathers for it is the layer's own.
            block.register_forward_pre_hook(partial(_enter, words), prepend=True)
            block.register_forward_hook(partial(_leave, words))
        if not isinstance(part.tok_embeddings, nn.Identity):
            part.tok_embeddings.register_forward_hook(partial(_leave, "the embedding"))


def _enter(layer: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    POSITION.enter_layer(layer)


def _leave(layer: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Leave the forward. The layer's backward begins with the gradient of its output."""
    POSITION.enter_layer("")
    if output.requires_grad:
        output.register_hook(partial(_enter_backward, layer))


def _enter_backward(layer: str, gradient: Tensor) -> None:
    POSITION.enter_layer(f"{layer}'s backward")
