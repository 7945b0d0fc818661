"""Stop a run before its last step, with its state saved, to go on later.

A node's launcher leaves a request in the folder that it shares with its ranks. They see it in their
present step, agree on it in the step's own all-reduce, save, and leave an answer.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from titan_moe.runtime.launch import Launch, attempt_number

STOPPED = 75
"""The exit code of a run that stopped, saved: EX_TEMPFAIL of sysexits.h, "try again"."""
FOLDER = "TITAN_MOE_FAILURES"
"""The variable that names the folder of requests, answers and failures."""
BEGAN = "TITAN_MOE_BEGAN"
"""The variable with the launcher's start, in seconds of the machine's monotonic clock."""
_REQUEST, _ANSWER = "stop", "stopped"


def request_stop(folder: Path) -> None:
    """Ask the ranks of this node to stop. May run in a signal handler, and again."""
    (folder / _REQUEST).touch()


def has_stopped(folder: Path) -> bool:
    """Returns whether the ranks of the latest attempt stopped with a complete checkpoint."""
    attempts = all_attempts(folder)
    return bool(attempts) and (attempts[-1] / _ANSWER).exists()


def attempt_folder(environment: Mapping[str, str]) -> Path | None:
    """Make and return the folder for this attempt's answers and failures; those of attempts before
    a restart no longer count. None without a launcher."""
    if not environment.get(FOLDER):
        return None
    folder = Path(environment[FOLDER]) / f"attempt-{attempt_number(environment)}"
    folder.mkdir(exist_ok=True)
    return folder


def all_attempts(folder: Path) -> list[Path]:
    """Returns the folders of all attempts, the latest last."""
    return sorted(folder.glob("attempt-*"), key=lambda path: int(path.name.rpartition("-")[2]))


class Saves(Protocol):
    """Saves a run's state."""

    longest_save: float
    """Seconds of the longest save so far, from its beginning until it was seen to be complete."""

    def pending(self, step: int) -> bool:
        """Returns whether a save is under way, or due after a step."""


class StopWatch:
    """Decides on one rank whether the run must stop after the present step.

    Args:
        max_seconds: wall-clock limit of the run, counted from the start of its launcher; 0 is none.
    """

    def __init__(self, max_seconds: int, launch: Launch, environment: Mapping[str, str]) -> None:
        self._folder = attempt_folder(environment)
        self._leads_node = launch.local_rank == 0
        self._end: float | None = None
        # One clock decides: the clocks of machines do not start together.
        if max_seconds and launch.rank == 0:
            self._end = float(environment.get(BEGAN, time.monotonic())) + max_seconds
        self._last: float | None = None
        self._saving = 0.0
        self._longest_step = self._longest_rest = self._longest_save = 0.0
        self._saves_to_come = 1

    def asks(self) -> bool:
        """Returns whether this rank asks all to stop. Must be called once in each step, as late as
        the step's all-reduce allows."""
        now = time.monotonic()
        if self._last is not None:
            self._longest_step = max(self._longest_step, now - self._last - self._saving)
        self._last, self._saving = now, 0.0
        if self._end is not None and now + self._needed() >= self._end:
            return True
        if self._folder is None or not self._leads_node:
            return False
        return (self._folder.parent / _REQUEST).exists()

    def _needed(self) -> float:
        """Returns the seconds until all is saved if the run stops one step later."""
        return self._longest_step + self._longest_rest + self._saves_to_come * self._longest_save

    @contextmanager
    def saving(self, saves: Saves, step: int) -> Iterator[None]:
        """Measure how long a step waits for its save, or to go back to one."""
        began = time.monotonic()
        if self._last is not None:
            self._longest_rest = max(self._longest_rest, began - self._last)
        yield
        self._saving += time.monotonic() - began
        self._longest_save = max(self._longest_save, saves.longest_save)
        # A save under way must end before the last one begins.
        self._saves_to_come = 1 + saves.pending(step + 1)

    def answer(self) -> None:
        """Tell the launcher that the state is saved and complete."""
        if self._folder is not None and self._leads_node:
            (self._folder / _ANSWER).touch()
