"""SIGKILL at random instants: every run goes on, and ends as the one that was never disturbed."""

import random
import time
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.jobs import Job
from tests.fuzz.runs import INTERVAL, STEPS, Undisturbed, draw_run
from tests.fuzz.verdict import Outcome

_TWICE = 0.25
_VICTIMS = ("rank",) * 8 + ("job", "launcher", "torchrun") * 2
_SAVING = (
    ".step-{step}.writing",
    ".step-{step}.writing/*.distcp",
    ".step-{step}.writing/.metadata",
    ".step-{step}.writing/manifest.json",
    ".step-{step}.writing/SHA256SUMS",
    "step-{step}",
    ".step-{earlier}.deleting",
)
"""What appears in the folder of checkpoints during a save, and just behind it."""
_DELAY_S = 0.1
_POLL_S = 0.001


class Instant(NamedTuple):
    """When something happens to a run."""

    appears: str
    """Once there is such a file in the folder of checkpoints; empty: from the start of the run."""
    share: float
    """Of the undisturbed run's time; behind a file, of a tenth of a second."""

    def __str__(self) -> str:
        behind = f"behind {self.appears}" if self.appears else "of the run"
        return f"{self.share:.3f} {behind}"


class Kill(NamedTuple):
    """What is killed, and when."""

    victim: str
    number: int
    """The number of the rank."""
    instant: Instant


def draw_instant(random_: random.Random) -> Instant:
    """Half of them lie inside saves."""
    share = random_.random()
    if random_.random() < 0.5:
        return Instant("", share)
    step = random_.randrange(INTERVAL, STEPS + 1, INTERVAL)
    earlier = max(INTERVAL, step - 2 * INTERVAL)
    return Instant(random_.choice(_SAVING).format(step=step, earlier=earlier), share)


def wait_for(instant: Instant, job: Job, folder: Path, whole_s: float) -> bool:
    """Whether a run in `folder` has come there; it has not where it ended before.

    `whole_s`: time of the undisturbed run.
    """
    began = time.monotonic()
    seconds = instant.share * (_DELAY_S if instant.appears else whole_s)
    while instant.appears and not any((folder / "checkpoint").glob(instant.appears)):
        if job.poll() is not None:
            return False
        time.sleep(_POLL_S)
        began = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0:
        if job.poll() is not None:
            return False
        time.sleep(min(left, 10 * _POLL_S))
    return job.poll() is None


def draw_kills(random_: random.Random) -> list[Kill]:
    """One or two kills."""
    return [
        Kill(random_.choice(_VICTIMS), random_.randrange(4), draw_instant(random_))
        for _ in range(1 + (random_.random() < _TWICE))
    ]


def trial(
    undisturbed: Undisturbed, seconds: float, own: Path, random_: random.Random
) -> tuple[str, Outcome]:
    """Kills one run once or twice, and resumes it; each start may take `seconds`."""
    run, kills = draw_run(random_), draw_kills(random_)
    what = "; ".join(f"{kill.victim} {kill.number} at {kill.instant}" for kill in kills)
    whole, folder, said = undisturbed.of(run), own / "run", []
    for kill in kills:
        job = run.start(folder, own)
        if not _kill(kill, job, folder, whole.seconds):
            if (code := job.wait(seconds)) != 0:
                said.append(f"before the kill: {code}: {job.words()}")
                return f"{run}: {what}", Outcome("failed", "; ".join(said))
            continue
        problem = whole.half_written(folder) if job.gone(seconds) else f"not ended: {job.alive()}"
        if problem:
            return f"{run}: {what}", Outcome("failed", problem)
        saves = sorted(path.name for path in (folder / "checkpoint").glob(".step-*"))
        said.append(f"killed in a save ({', '.join(saves)})" if saves else "killed outside saves")
    job = run.start(folder, own)
    code = job.wait(seconds)
    problem = f"{code}: {job.words()}" if code else whole.unlike(folder)
    if code is None or problem:
        return f"{run}: {what}", Outcome("failed", f"resumed ({'; '.join(said)}): {problem}")
    return f"{run}: {what}", Outcome("resumed" if said else "missed", "; ".join(said))


def _kill(kill: Kill, job: Job, folder: Path, whole_s: float) -> bool:
    """Returns whether there was something to kill before the run had ended."""
    if not wait_for(kill.instant, job, folder, whole_s):
        return False
    while not job.kill(kill.victim, kill.number):  # It may not have started yet.
        if job.poll() is not None:
            return False
        time.sleep(_POLL_S)
    return True
