"""Trains two runs to the step where they diverge, and captures that step of both.

Both start the step from the same state: the baseline's, which is saved as a checkpoint before it.
So any difference of the captures arose in that step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_moe.config.errors import ConfigError
from titan_moe.models.hf import model_of_job
from titan_moe.parallelize.plan import types_of
from titan_moe.training.capture.step import FOLDER
from titan_moe.verify.compare.launch import Launcher
from titan_moe.verify.compare.pinned_routes import ROUTES
from titan_moe.verify.compare.records import COMPARED
from titan_moe.verify.compare.run_spec import RunSpec, Words, words_of
from titan_moe.verify.compare.runner import Progress, Runner
from titan_moe.verify.compare.trial import Trial
from titan_moe.verify.compare.verdict import common_steps, first_beyond, first_other_bits
from titan_moe.verify.localize.capture_reader import Capture, read_capture
from titan_moe.verify.localize.difference import ROUNDING
from titan_moe.verify.localize.localize import Finding, locate, uncompared


@dataclass(frozen=True)
class StepFinding:
    """The first difference at one step."""

    step: int
    finding: Finding | None
    """None: nothing differs there beyond rounding."""
    replayed: Finding | None = None
    """After a changed choice at a tie: with the baseline's routing."""
    uncompared: Sequence[str] = ()
    """Lines about places that one run lacks."""

    @property
    def named(self) -> bool:
        """Says whether something differs that rounding does not explain."""
        found = self.replayed if self.finding is not None and self.finding.tie else self.finding
        return found is not None

    def lines(self) -> list[str]:
        """Returns lines for a reader."""
        if self.finding is None:
            where = " where both runs have a place" if self.uncompared else ""
            return [f"step {self.step}: nothing differs beyond rounding{where}", *self.uncompared]
        lines = [f"step {self.step}:", *self.finding.lines()]
        if self.finding.tie:
            lines.append(f"step {self.step}, with the baseline's routing:")
            nothing = ["nothing differs beyond rounding"]
            lines += nothing if self.replayed is None else self.replayed.lines()
        return [*lines, *self.uncompared]


def bisect(
    trial: Trial, launcher: Launcher, steps: Sequence[int], progress: Progress = print
) -> list[StepFinding]:
    """Captures steps in their order until one shows a difference; empty if no bits differ.

    Args:
        steps: numbers of steps; none: the step at which the metrics first differ by a bit, then the
            first at which they differ by more than rounding.

    Raises ConfigError for runs that cannot be repeated, TrainingError for one that failed.
    """
    bisection = Bisection(trial, launcher, progress)
    for path in bisection.trial.finished:
        remedy = f"config={path / 'config.toml'} ranks=N"
        raise ConfigError(f"{path} is a finished run: train it again, as {remedy}")
    bisection.check()
    found: list[StepFinding] = []
    for step in steps or bisection.steps():
        found.append(bisection.at(step))
        if found[-1].named:
            break
    return found


class Bisection(Runner):
    """Runs with captures of one step."""

    def steps(self) -> list[int]:
        """Returns the steps at which metrics first differ by a bit, and by more than rounding."""
        runs = self.runs()
        common = sorted(set(runs[0].steps) & set(runs[1].steps))
        baseline, candidate = (run.at(common) for run in runs)
        bits = first_other_bits(baseline, candidate)
        if bits is None:
            common_steps(baseline, candidate)  # Raises: equal NaN are no equal runs.
            return []
        self.progress(
            f"first other bits at step {bits.step}: {bits.quantity} {bits.baseline!r} and "
            f"{bits.candidate!r}"
        )
        beyond = first_beyond(baseline, candidate, dict.fromkeys(COMPARED, self._bound()))
        return list(dict.fromkeys([bits.step, *([] if beyond is None else [beyond.step])]))

    def at(self, step: int) -> StepFinding:
        """Train this step of both runs from the baseline's state before it, and compare."""
        job, until = self._job(self.trial.baseline), self._until(step)

        def train(spec: RunSpec, name: str, *words: tuple[str, str]) -> Path:
            folder = self._run(spec, f"step-{step}/{name}", (*until, *words)).folder
            assert folder is not None
            return folder

        routed = model_of_job(job.model).moe is not None and job.debug.routing is None
        record = (("debug.routing_record", ROUTES),) if routed else ()
        before = train(self.trial.baseline, "baseline", *_saved(step - 1), *record)

        def capture(spec: RunSpec, name: str, *words: tuple[str, str]) -> Capture:
            return read_capture(train(spec, name, *_loaded(before, step - 1), *words) / FOLDER)

        replay = (("debug.routing_replay", str(before / ROUTES)),) if routed else ()
        baseline = read_capture(before / FOLDER)
        candidate = capture(self.trial.candidate, "candidate")
        # All keep the baseline's routing: one other choice would hide all later differences.
        controls = [
            capture(spec, f"control-{number}", *words, *replay)
            for number, (spec, words) in enumerate(self._variations(), 1)
        ]
        finding, alone = locate(baseline, candidate, controls), uncompared(baseline, candidate)
        if finding is None or not finding.tie:
            return StepFinding(step, finding, uncompared=alone)
        candidate = capture(self.trial.candidate, "candidate-replayed", *replay)
        return StepFinding(step, finding, locate(baseline, candidate, controls), alone)

    def _variations(self) -> list[tuple[RunSpec, Words]]:
        """Returns the baseline in other orders and layouts, and in float32 for a run of low
        precision, which show the effect of rounding."""
        found = [(spec, words) for spec, _, words in self.control_trainings()]
        if found and self._bound() > ROUNDING["float32"].bound:
            found.append((self.trial.baseline, (("training.mixed_precision_param", "float32"),)))
        return found

    def _until(self, step: int) -> Words:
        """Returns the keys that end a run with this step, at the learning rate it has in the whole
        one."""
        job = self._job(self.trial.baseline)
        total = job.lr_scheduler.total_steps or job.training.steps
        return (
            ("training.steps", str(step)),
            ("lr_scheduler.total_steps", str(total)),
            ("debug.capture_step", str(step)),
        )

    def _bound(self) -> float:
        return ROUNDING[types_of(self._job(self.trial.baseline).training).compute].bound


def _saved(step: int) -> Words:
    """Returns the keys of a run that saves its state after a step; none before the first."""
    if not step:
        return ()
    return words_of("checkpoint", enable=True, load_only=False, interval=step, keep_latest_k=0)


def _loaded(folder: Path, step: int) -> Words:
    """Returns the keys of a run that starts from what `_saved` makes a run in this folder save."""
    if not step:
        return ()
    path = folder / "checkpoint" / f"step-{step}"
    whole = {"initial_load_model_only": False, "initial_load_in_hf": False}
    return words_of("checkpoint", enable=True, load_only=True, initial_load_path=path, **whole)
