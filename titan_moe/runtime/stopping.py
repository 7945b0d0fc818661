"""A run that stops before its last step, with its state saved, to go on later.

Each node's launcher leaves a request in the folder that it shares with its ranks. They see it in
the step that they are in, agree on it in that step's own all-reduce, save, and leave an answer.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from titan_moe.runtime.launch import Launch, attempt_number

STOPPED = 75
"""Exit code of a run that stopped so: EX_TEMPFAIL of sysexits.h, "try again"."""
FOLDER = "TITAN_MOE_FAILURES"
"""The variable that tells ranks the folder of requests, answers and failures."""
BEGAN = "TITAN_MOE_BEGAN"
"""The variable that tells ranks when the launcher began, on the machine's monotonic clock."""
_REQUEST, _ANSWER = "stop", "stopped"


def request_stop(folder: Path) -> None:
    """Ask the ranks of this node to stop; safe in a signal handler, and again."""
    (folder / _REQUEST).touch()


def has_stopped(folder: Path) -> bool:
    """Whether the ranks of the latest attempt stopped with a complete checkpoint."""
    attempts = all_attempts(folder)
    return bool(attempts) and (attempts[-1] / _ANSWER).exists()


def attempt_folder(environment: Mapping[str, str]) -> Path | None:
    """The folder, made here, for what the ranks of this attempt leave: torchrun may have started
    others before them, whose words no longer count. None without a launcher."""
    if not environment.get(FOLDER):
        return None
    folder = Path(environment[FOLDER]) / f"attempt-{attempt_number(environment)}"
    folder.mkdir(exist_ok=True)
    return folder


def all_attempts(folder: Path) -> list[Path]:
    """The folders of all attempts, the latest last."""
    return sorted(folder.glob("attempt-*"), key=lambda path: int(path.name.rpartition("-")[2]))


class Saves(Protocol):
    """What saves a run's state."""

    longest_save: float
    """Seconds of the longest save so far, from its beginning until it was seen to be complete."""

    def pending(self, step: int) -> bool:
        """Whether a save is under way, or due after a step."""


class StopWatch:
    """One rank's part in stopping: whether it asks all to stop after the step that it is in.

    Args:
        max_seconds: wall-clock limit of the run, counted from the start of its launcher; 0 is none.
    """

    def __init__(self, max_seconds: int, launch: Launch, environment: Mapping[str, str]) -> None:
        self._folder = attempt_folder(environment)
        self._leads_node = launch.local_rank == 0
        self._end: float | None = None
        # One clock decides: other machines' started otherwise.
        if max_seconds and launch.rank == 0:
            self._end = float(environment.get(BEGAN, time.monotonic())) + max_seconds
        self._last: float | None = None
        self._saving = 0.0
        self._longest_step = self._longest_rest = self._longest_save = 0.0
        self._saves_to_come = 1

    def asks(self) -> bool:
        """Called once in each step, as late as its all-reduce allows."""
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
        """Seconds until all is saved if the run stops at the next step and not at this one."""
        return self._longest_step + self._longest_rest + self._saves_to_come * self._longest_save

    @contextmanager
    def saving(self, saves: Saves, step: int) -> Iterator[None]:
        """Time what a step waits for its save, or to go back to one: other steps do not take it."""
        began = time.monotonic()
        if self._last is not None:
            self._longest_rest = max(self._longest_rest, began - self._last)
        yield
        self._saving += time.monotonic() - began
        self._longest_save = max(self._longest_save, saves.longest_save)
        # One that is under way is waited for before the last one begins.
        self._saves_to_come = 1 + saves.pending(step + 1)

    def answer(self) -> None:
        """Tell the launcher that the state is saved and complete."""
        if self._folder is not None and self._leads_node:
            (self._folder / _ANSWER).touch()
