"""File systems that fill up, turn read-only, or go away under a run: nothing is lost.

They are real ones, in memory, and mounted for the process of a trial alone: they go with it.
"""

import ctypes
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.apart import Outcome, run_apart
from tests.fuzz.jobs import Job
from tests.fuzz.kills import Instant, draw_instant, wait_for
from tests.fuzz.runs import LAYOUTS, MODES, Run, Undisturbed, Whole
from tests.fuzz.verdict import refused

_COMMANDED = 0.06
_LAYOUTS = [name for name, (ranks, _) in LAYOUTS.items() if ranks <= 2]
_PAGE = 4096
_CLONE_NEWNS = 0x00020000


class Place(NamedTuple):
    """Where a trial takes place."""

    folder: Path
    """job.dump_folder."""
    mounted: Path
    """The part of it that is a disk of its own."""
    disk: Path
    """That disk by another name, under which it stays."""


class Trouble(NamedTuple):
    """What befalls the disk of a run, and how it is mended."""

    what: str
    size: int
    """Of the disk, in bytes; 0: as large as need be."""
    instant: Instant | None
    """None: from the start."""
    strike: Callable[[Place, Job | None], bool]
    """Returns whether it did; the job is the one that runs."""
    mend: Callable[[Place], None]
    inside: str = ""
    """The folder of the run that is on the disk; empty: all of it."""


def can_mount() -> bool:
    """Whether this process may mount a file system, which takes root."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


class Disks:
    """Trials of the three kinds."""

    def __init__(self, undisturbed: Undisturbed, seconds: float) -> None:
        """`seconds`: of a run."""
        self._undisturbed = undisturbed
        self._seconds = seconds

    def trial(self, name: str, random_: random.Random) -> tuple[str, Outcome]:
        """One run on a disk in trouble, and how it ended."""
        by_command = random_.random() < _COMMANDED
        run = Run(random_.choice(_LAYOUTS), random_.choice(MODES), by_command)
        whole = self._undisturbed.of(run)
        trouble = TROUBLES[name](random_, whole)
        # A file that is open to be written keeps its file system writable, and the lines of a
        # command's log are read.
        log_there = random_.random() < 0.5 and not (by_command or trouble.inside)
        when = "from the start" if trouble.instant is None else f"at {trouble.instant}"
        what = f"{run}: {trouble.what} {when}{', with the log' * log_there}"
        outcome = run_apart(
            lambda own: self._try(run, trouble, own, log_there=log_there), seconds=3 * self._seconds
        )
        return what, outcome

    def _try(self, run: Run, trouble: Trouble, own: Path, *, log_there: bool) -> Outcome:
        whole, place = self._undisturbed.of(run), _mount(own, trouble.size, trouble.inside)
        if trouble.instant is None:
            trouble.strike(place, None)
        job = run.start(place.folder, own, place.disk / "log" if log_there else None)
        struck = trouble.instant is None or (
            wait_for(trouble.instant, job, place.folder, whole.seconds[run.by_command])
            and trouble.strike(place, job)
        )
        code = job.wait(self._seconds)
        if job.gone(self._seconds) is None:
            return Outcome("failed", f"{len(job.alive())} processes had not ended: {job.words()}")
        said = _verdict(code, job, place)
        if said.kind == "failed":
            return said
        if problem := whole.half_written(place.folder):
            return Outcome("failed", f"before mending: {problem}")
        trouble.mend(place)
        if problem := whole.half_written(place.folder):
            return Outcome("failed", problem)
        job = run.start(place.folder, own)
        if (code := job.wait(self._seconds)) != 0:
            return Outcome("failed", f"resumed after {said.said}: {code}: {job.words()}")
        if problem := whole.unlike(place.folder):
            return Outcome("failed", f"resumed after {said.said}: {problem}")
        missed = said.kind == "read" and not struck
        return Outcome("missed" if missed else "resumed", said.said)


def _verdict(code: int | None, job: Job, place: Place) -> Outcome:
    """Of the run in trouble: it may go on to its end, or say what is wrong."""
    if code == 0:
        return Outcome("read", "went on")
    said = refused(job.error_lines())
    named = str(place.folder) in said.said
    if said.kind == "refused" and named and code == 1:
        return said
    return Outcome("failed", f"exit code {code}: {said.said}: {job.words()}")


def _full(random_: random.Random, whole: Whole) -> Trouble:
    """Too small for its checkpoints, or filled by another program."""
    if random_.random() < 0.5:
        size = _PAGE * random_.randrange(4, 3 * whole.size // _PAGE)
        return Trouble(f"{size} bytes", size, None, _nothing, _make_room)
    left = random_.choice((0, 0, 1, 2, 10))
    size, strike = 5 * whole.size, _fill(left)
    return Trouble(f"filled but for {left} pages", size, draw_instant(random_), strike, _make_room)


def _nothing(place: Place, job: Job | None) -> bool:
    return True


def _fill(left: int) -> Callable[[Place, Job | None], bool]:
    def fill(place: Place, job: Job | None) -> bool:
        ballast = place.disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(_PAGE))
        os.truncate(ballast, max(0, ballast.stat().st_size - left * _PAGE))
        return True

    return fill


def _make_room(place: Place) -> None:
    (place.disk / "ballast").unlink(missing_ok=True)
    _mounting("-o", "remount,size=2g", str(place.disk))


def _read_only(random_: random.Random, whole: Whole) -> Trouble:
    """From the start, or the checkpoints' part of it during the run."""
    if random_.random() < 0.2:
        return Trouble("read-only", 0, None, _forbid, _permit)
    return Trouble("read-only", 0, draw_instant(random_), _forbid, _permit, "checkpoint")


def _forbid(place: Place, job: Job | None) -> bool:
    """Linux refuses while a file is open to be written: so it may have to wait for a save's end."""
    while not _try_mounting("-o", "remount,ro", str(place.disk)):
        if job is None or job.poll() is not None:
            return False
        time.sleep(0.001)
    return True


def _permit(place: Place) -> None:
    _mounting("-o", "remount,rw", str(place.disk))


def _removed(random_: random.Random, whole: Whole) -> Trouble:
    """Taken away, or its checkpoints deleted."""
    if random_.random() < 0.5:
        return Trouble("taken away", 0, draw_instant(random_), _take_away, _bring_back)
    return Trouble("emptied", 0, draw_instant(random_), _empty, lambda place: None)


def _take_away(place: Place, job: Job | None) -> bool:
    subprocess.run(["umount", "--lazy", str(place.mounted)], check=True)
    return True


def _bring_back(place: Place) -> None:
    _mounting("--bind", str(place.disk), str(place.mounted))


def _empty(place: Place, job: Job | None) -> bool:
    aside = place.folder / "removed"
    with suppress(FileNotFoundError):
        (place.folder / "checkpoint").rename(aside)
        shutil.rmtree(aside)
    return True


TROUBLES: dict[str, Callable[[random.Random, Whole], Trouble]] = {
    "full": _full,
    "read_only": _read_only,
    "removed": _removed,
}


def _mount(own: Path, size: int, inside: str) -> Place:
    """A new file system for this process and those that it starts."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "cannot have mounts of its own")
    _mounting("--make-rprivate", "/")
    place = Place(own / "run", own / "run" / inside, own / "disk")
    place.mounted.mkdir(parents=True)
    place.disk.mkdir()
    _mounting("-t", "tmpfs", "-o", f"size={size or '2g'}", "tmpfs", str(place.disk))
    _bring_back(place)
    return place


def _mounting(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _try_mounting(*arguments: str) -> bool:
    command = ["mount", *arguments]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
