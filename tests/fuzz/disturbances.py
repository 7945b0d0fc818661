"""SIGKILL at random instants, and file systems that fill up, turn read-only or go away.

Every run goes on, and ends as the one that was never disturbed. The file systems are real ones, in
memory, and mounted for this process alone: they end with it.
"""

import ctypes
import random
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.runs import INTERVAL, STEPS, Outcome, draw_run, refused, undisturbed
from tests.support.jobs import Job, end_all

_TWICE = 0.25
_VICTIMS = ("rank",) * 8 + ("job", "launcher", "torchrun") * 2
_SAVING = (
    ".step-{step}.writing",
    ".step-{step}.writing/*.distcp",
    ".step-{step}.writing/.metadata",
    ".step-{step}.writing/train_state.json",
    ".step-{step}.writing/manifest.json",
    "step-{step}",
    ".step-{earlier}.deleting",
)
"""Files that appear in the folder of checkpoints during a save, and just behind it."""
_DELAY_S = 0.1
_POLL_S = 0.001
_CLONE_NEWNS = 0x00020000


class Strike(NamedTuple):
    """An instant of a run, and the process that a kill is for."""

    victim: str
    number: int
    """The number of the rank."""
    appears: str
    """Pattern of a file among the checkpoints, at which the wait begins; empty: at the start."""
    share: float
    """Length of the wait: a share of the undisturbed run, after a file of a tenth of a second."""


class Place(NamedTuple):
    """The folders of a trial."""

    folder: Path
    """job.dump_folder."""
    mounted: Path
    """The part of it that may be a disk of its own."""
    disk: Path
    """That disk by another name, under which it stays."""


class Disturbance(NamedTuple):
    """A fault of a run, and the repair of its disk."""

    strike: Callable[[Place, Job, Strike], bool]
    """Causes the fault; returns whether it could."""
    mend: Callable[[Place], None] | None = None
    """None if the run has no disk of its own."""
    inside: str = ""
    """The folder of the run that is on the disk; empty: all of it."""


def draw_strikes(random_: random.Random) -> list[Strike]:
    """Draws one or two. Half of them lie inside saves."""
    strikes = []
    for _ in range(1 + (random_.random() < _TWICE)):
        victim, number = random_.choice(_VICTIMS), random_.randrange(4)
        share, appears = random_.random(), ""
        if random_.random() >= 0.5:
            step = random_.randrange(INTERVAL, STEPS + 1, INTERVAL)
            earlier = max(INTERVAL, step - 2 * INTERVAL)
            appears = random_.choice(_SAVING).format(step=step, earlier=earlier)
        strikes.append(Strike(victim, number, appears, share))
    return strikes


def trial(
    work: Path, seconds: float, name: str, own: Path, random_: random.Random
) -> tuple[str, Outcome]:
    """Disturbs one run once or twice, and resumes it; each start may take `seconds`."""
    run, kind, strikes = draw_run(random_), DISTURBANCES[name], draw_strikes(random_)
    what = "; ".join([str(run), *map(str, strikes)])
    whole = undisturbed(run.layout, work, seconds)
    place = Place(own / "run", own / "run" / kind.inside, own / "disk")
    if kind.mend is not None:
        _make_disk(place, 5 * whole.size)
    said = []
    try:
        for strike in strikes:
            job = run.start(place.folder, own)
            came = _wait_for(strike, job, place.folder, whole.seconds)
            struck = came and kind.strike(place, job, strike)
            problem = _judge(job, place, struck, kind, seconds) or whole.half_written(place.folder)
            if struck and kind.mend is not None:
                kind.mend(place)
                problem = problem or whole.half_written(place.folder)
            if problem:
                return what, Outcome("failed", problem)
            said += [f"exit code {job.poll()}"] * struck
        job = run.start(place.folder, own)
        code = job.wait(seconds)
        problem = whole.unlike(place.folder) if code == 0 else f"exit code {code}: {job.output()}"
        if problem:
            return what, Outcome("failed", f"resumed after {said}: {problem}")
        return what, Outcome("resumed" if said else "missed", "; ".join(said))
    finally:
        end_all()
        for folder in (place.mounted, place.disk):
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def _wait_for(strike: Strike, job: Job, folder: Path, whole_s: float) -> bool:
    """Waits for the instant; returns False if the run in `folder` ended before it.

    `whole_s`: time of the undisturbed run.
    """
    began = time.monotonic()
    seconds = strike.share * (_DELAY_S if strike.appears else whole_s)
    while strike.appears and not any((folder / "checkpoint").glob(strike.appears)):
        if job.poll() is not None:
            return False
        time.sleep(_POLL_S)
        began = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0 and job.poll() is None:
        time.sleep(min(left, 10 * _POLL_S))
    return job.poll() is None


def _judge(job: Job, place: Place, struck: bool, kind: Disturbance, seconds: float) -> str:
    """Returns what is wrong with a run's end; a disturbed run may fail in clear lines."""
    if not job.gone(seconds):
        return f"{len(job.pids('job'))} processes had not ended: {job.output()}"
    if job.poll() == 0 or (struck and kind.mend is None):
        return ""
    said = refused(job.error_lines())
    clear = said.kind == "refused" and str(place.folder) in said.said and job.poll() == 1
    return "" if struck and clear else f"exit code {job.poll()}: {said.said}: {job.output()}"


def _kill(place: Place, job: Job, strike: Strike) -> bool:
    while not job.kill(strike.victim, strike.number):  # It may not have started yet.
        if job.poll() is not None:
            return False
        time.sleep(_POLL_S)
    return True


def _fill(place: Place, job: Job, strike: Strike) -> bool:
    with suppress(OSError), (place.disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return True


def _forbid(place: Place, job: Job, strike: Strike) -> bool:
    """Waits for the end of a save: Linux refuses while a file is open to be written."""
    while True:
        try:
            _mount("-o", "remount,ro", str(place.disk))
            return True
        except subprocess.CalledProcessError:
            if job.poll() is not None:
                return False
            time.sleep(_POLL_S)


def _take_away(place: Place, job: Job, strike: Strike) -> bool:
    subprocess.run(["umount", "--lazy", str(place.mounted)], check=True)
    return True


def _bring_back(place: Place) -> None:
    _mount("--bind", str(place.disk), str(place.mounted))


DISTURBANCES = {
    "kills": Disturbance(_kill),
    "full": Disturbance(_fill, lambda place: (place.disk / "ballast").unlink()),
    "read_only": Disturbance(
        _forbid, lambda place: _mount("-o", "remount,rw", str(place.disk)), inside="checkpoint"
    ),
    "removed": Disturbance(_take_away, _bring_back),
}


def can_mount() -> bool:
    """Returns whether this process may mount a file system, which takes root."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@cache
def _unshare_mounts() -> None:
    """Gives this process mounts of its own, which end with it."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "cannot have mounts of its own")
    _mount("--make-rprivate", "/")


def _make_disk(place: Place, size: int) -> None:
    _unshare_mounts()
    place.mounted.mkdir(parents=True)
    place.disk.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place.disk))
    _bring_back(place)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
