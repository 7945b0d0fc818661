"""Stops a run before its last step, with its state saved, to go on later.

A node's launcher leaves a request in the folder that it shares with its ranks. They see it in their
present step, agree on it in the step's own all-reduce, save, and leave an answer.
"""

from collections.abc import Mapping
from pathlib import Path

from titan_moe.runtime.launch import Launch, attempt_number

STOPPED = 75
"""The exit code of a run that stopped, saved: EX_TEMPFAIL of sysexits.h, "try again"."""
FOLDER = "TITAN_MOE_ATTEMPTS"
"""The variable that names the launcher's folder: the request to stop, and a folder of answers and
failures for each attempt."""
_REQUEST, _ANSWER = "stop", "stopped"


def request_stop(folder: Path) -> bool:
    """Ask the ranks of this node to stop; returns whether this is the first request. May run in a
    signal handler, and again."""
    is_first = not (folder / _REQUEST).exists()
    (folder / _REQUEST).touch()
    return is_first


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


class StopRequest:
    """The launcher's request to stop, and this rank's answer. The first rank of a node speaks for
    the node."""

    def __init__(self, launch: Launch, environment: Mapping[str, str]) -> None:
        self._folder = attempt_folder(environment) if launch.local_rank == 0 else None

    def asks(self) -> bool:
        """Returns whether this rank asks all to stop after the present step."""
        return self._folder is not None and (self._folder.parent / _REQUEST).exists()

    def answer(self) -> None:
        """Tell the launcher that the state is saved and complete."""
        if self._folder is not None:
            (self._folder / _ANSWER).touch()
