"""SIGKILL at random instants: every run goes on, and ends as the one that was never disturbed."""

import random
import time
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.apart import Outcome, run_apart
from tests.fuzz.jobs import Job
from tests.fuzz.runs import INTERVAL, STEPS, Run, Undisturbed, draw_run

_COMMANDED = 0.06
_TWICE = 0.25
_VICTIMS = ("rank",) * 8 + ("job", "job")
_OF_A_COMMAND = (*_VICTIMS, *("launcher", "torchrun") * 3)
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


class Kills:
    """Trials of one kind."""

    def __init__(self, undisturbed: Undisturbed, seconds: float) -> None:
        """`seconds`: of a run."""
        self._undisturbed = undisturbed
        self._seconds = seconds

    def trial(self, random_: random.Random) -> tuple[str, Outcome]:
        """One run, killed once or twice, and how it ended."""
        run = draw_run(random_, commanded=_COMMANDED)
        victims = _OF_A_COMMAND if run.by_command else _VICTIMS
        kills = [
            Kill(random_.choice(victims), random_.randrange(4), draw_instant(random_))
            for _ in range(1 + (random_.random() < _TWICE))
        ]
        self._undisturbed.of(run)
        what = "; ".join(f"{kill.victim} {kill.number} at {kill.instant}" for kill in kills)
        outcome = run_apart(
            lambda own: self._try(run, kills, own), seconds=self._seconds * (len(kills) + 2)
        )
        return f"{run}: {what}", outcome

    def _try(self, run: Run, kills: list[Kill], own: Path) -> Outcome:
        whole, folder, said = self._undisturbed.of(run), own / "run", []
        for kill in kills:
            job = run.start(folder, own)
            if not self._kill(kill, job, folder, whole.seconds[run.by_command]):
                if (code := job.wait(self._seconds)) != 0:
                    return Outcome("failed", f"before the kill: {code}: {job.words()}")
                said.append("had ended")
                continue
            took = job.gone(self._seconds)
            if took is None:
                left = "; ".join(f"{each.pid}: {each.command[-80:]}" for each in job.alive())
                return Outcome("failed", f"not ended after {self._seconds:.0f} s: {left}")
            if problem := whole.half_written(folder):
                return Outcome("failed", problem)
            said.append(f"{_where(folder)}, all ended within {took:.1f} s")
        job = run.start(folder, own)
        code = job.wait(self._seconds)
        if code != 0:
            return Outcome("failed", f"resumed ({'; '.join(said)}): {code}: {job.words()}")
        if problem := whole.unlike(folder):
            return Outcome("failed", f"resumed ({'; '.join(said)}): {problem}")
        missed = all(each == "had ended" for each in said)
        return Outcome("missed" if missed else "resumed", "; ".join(said))

    def _kill(self, kill: Kill, job: Job, folder: Path, whole_s: float) -> bool:
        """Whether there was something to kill before the run had ended."""
        if not wait_for(kill.instant, job, folder, whole_s):
            return False
        while not job.kill(kill.victim, kill.number):  # It may not have started yet.
            if job.poll() is not None:
                return False
            time.sleep(_POLL_S)
        return True


def _where(folder: Path) -> str:
    """In what a run was killed."""
    saves = sorted(path.name for path in (folder / "checkpoint").glob(".step-*"))
    return f"in a save ({', '.join(saves)})" if saves else "outside saves"
