"""A thread per rank that notices when a collective waits past its limit, tells all ranks through
the store, gathers what each is doing, and ends the run with one report.

The store is that through which the ranks met: it works while no collective does. A rank that does
not answer (stopped, killed, or inside a call that holds Python's lock) is named as silent.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_moe.config.job_config import Comm
from titan_moe.debug.hang.analysis import analyse
from titan_moe.debug.hang.records import default_store, make_record, seconds_waited
from titan_moe.debug.hang.reports import write_report
from titan_moe.runtime.errors import report
from titan_moe.runtime.position import POSITION
from titan_moe.runtime.process import BACKEND_GRACE_S, Process

logger = logging.getLogger(__name__)

_ASKED, _LINES = "hang/asked", "hang/lines"
_ANSWER_S = 10.0
"""The longest that other ranks' records are waited for."""
_LONGEST_SILENCE_S = 30 * 60
"""The longest that a phase of a step shows no sign of life, if no save may take longer."""
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
        self._store = default_store()
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
            return False  # Also because reading the recorder takes a tenth of a second.
        if quiet > self._longest_silence and POSITION.last().phase != "start":
            return True
        return any(age > limit - BACKEND_GRACE_S for age, limit in seconds_waited(now))

    def _gather(self) -> tuple[list[str], bool]:
        """The report's lines, and whether this rank wrote them."""
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
