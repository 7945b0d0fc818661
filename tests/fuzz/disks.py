"""File systems that fill up, turn read-only, or go away under a run: nothing is lost.

They are real ones, in memory, and mounted for this process alone: they go with it.
"""

import ctypes
import random
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.jobs import Job, end_all
from tests.fuzz.kills import draw_instant, wait_for
from tests.fuzz.runs import LAYOUTS, MODES, Run, Undisturbed
from tests.fuzz.verdict import Outcome, refused

_LAYOUTS = [name for name, (ranks, _) in LAYOUTS.items() if ranks <= 2]
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

    strike: Callable[[Place, Job], bool]
    """Returns whether it did."""
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
    """Trials of the three kinds; each run may take `seconds`.

    This process gets mounts of its own, which end with it.
    """

    def __init__(self, undisturbed: Undisturbed, seconds: float) -> None:
        self._undisturbed = undisturbed
        self._seconds = seconds
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "cannot have mounts of its own")
        _mount("--make-rprivate", "/")

    def trial(self, name: str, own: Path, random_: random.Random) -> tuple[str, Outcome]:
        """Runs once on a disk in trouble, mends the disk and runs again."""
        run, instant = Run(random_.choice(_LAYOUTS), random_.choice(MODES)), draw_instant(random_)
        whole, trouble, what = self._undisturbed.of(run), TROUBLES[name], f"{run}: {name} {instant}"
        place = Place(own / "run", own / "run" / trouble.inside, own / "disk")
        place.mounted.mkdir(parents=True)
        place.disk.mkdir()
        _mount("-t", "tmpfs", "-o", f"size={5 * whole.size}", "tmpfs", str(place.disk))
        _bring_back(place)
        try:
            job = run.start(place.folder, own)
            came = wait_for(instant, job, place.folder, whole.seconds)
            struck = came and trouble.strike(place, job)
            said = _verdict(job, place, self._seconds)
            if said.kind == "failed":
                return what, said
            problem = whole.half_written(place.folder)
            trouble.mend(place)
            if problem := problem or whole.half_written(place.folder):
                return what, Outcome("failed", problem)
            job = run.start(place.folder, own)
            code = job.wait(self._seconds)
            problem = whole.unlike(place.folder) if code == 0 else f"{code}: {job.words()}"
            if problem:
                return what, Outcome("failed", f"resumed after {said.said}: {problem}")
            missed = said.kind == "read" and not struck
            return what, Outcome("missed" if missed else "resumed", said.said)
        finally:
            end_all()
            for folder in (place.mounted, place.disk):
                subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def _verdict(job: Job, place: Place, seconds: float) -> Outcome:
    """Judges the run in trouble: it may go on to its end, or say what is wrong."""
    code = job.wait(seconds)
    if not job.gone(seconds):
        return Outcome("failed", f"{len(job.alive())} processes had not ended: {job.words()}")
    if code == 0:
        return Outcome("read", "went on")
    said = refused(job.error_lines())
    if said.kind == "refused" and str(place.folder) in said.said and code == 1:
        return said
    return Outcome("failed", f"exit code {code}: {said.said}: {job.words()}")


def _fill(place: Place, job: Job) -> bool:
    with suppress(OSError), (place.disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return True


def _make_room(place: Place) -> None:
    (place.disk / "ballast").unlink(missing_ok=True)


def _forbid(place: Place, job: Job) -> bool:
    """Waits for the end of a save: Linux refuses while a file is open to be written."""
    while True:
        try:
            _mount("-o", "remount,ro", str(place.disk))
            return True
        except subprocess.CalledProcessError:
            if job.poll() is not None:
                return False
            time.sleep(0.001)


def _permit(place: Place) -> None:
    _mount("-o", "remount,rw", str(place.disk))


def _take_away(place: Place, job: Job) -> bool:
    subprocess.run(["umount", "--lazy", str(place.mounted)], check=True)
    return True


def _bring_back(place: Place) -> None:
    _mount("--bind", str(place.disk), str(place.mounted))


TROUBLES = {
    "full": Trouble(_fill, _make_room),
    "read_only": Trouble(_forbid, _permit, inside="checkpoint"),
    "removed": Trouble(_take_away, _bring_back),
}


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
