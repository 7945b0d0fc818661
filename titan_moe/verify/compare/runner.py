"""A comparison from beginning to end: a seed checkpoint, two runs, control runs, a verdict."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.stages import tokens_in_words, tokens_per_step
from titan_moe.runtime import launch
from titan_moe.train import prepare
from titan_moe.verify.compare.comparison import Comparison, Verdict
from titan_moe.verify.compare.control_runs import batch_words, control_specs
from titan_moe.verify.compare.goldens import (
    Golden,
    find_golden,
    is_golden,
    save_golden,
    this_device,
)
from titan_moe.verify.compare.launch import Launcher
from titan_moe.verify.compare.noise.band import EARLY_LOOKS, FEWEST_CONTROLS
from titan_moe.verify.compare.records import RunRecord, read_run
from titan_moe.verify.compare.routing_diff import routing_diff
from titan_moe.verify.compare.run_spec import RunSpec, Words
from titan_moe.verify.compare.verdict import compare_runs

_RECORD, _REPLAY = "debug.routing_record", "debug.routing_replay"
Progress = Callable[[str], None]
"""Prints a line of progress."""


@dataclass(frozen=True)
class Plan:
    """What is to be compared, and how closely."""

    title: str
    baseline: RunSpec
    candidate: RunSpec
    num_control_runs: int
    """Variations of the baseline; 0: only bits are compared."""
    steps: int | None = None
    """Left out: as the configuration says."""
    control_layouts: Sequence[str] = ()
    """Layouts of control runs; empty: the neighbours of the baseline's own."""
    control_paths: Sequence[Path] = ()
    """Finished runs to take as control runs instead."""
    norms: bool = False
    """Compare the norm of every parameter's and expert's gradient too."""
    routing: bool = False
    """Record both runs' routings, and train the candidate with the baseline's as well."""


def compare(plan: Plan, launcher: Launcher, progress: Progress = print) -> Comparison:
    """Train what is not there yet, and compare.

    Raises ConfigError for what cannot be compared, TrainingError for a run that failed.
    """
    runner = Runner(plan, launcher, progress)
    if 0 < plan.num_control_runs < FEWEST_CONTROLS:
        raise ConfigError(
            [f"--repeats {plan.num_control_runs}: 0, or {FEWEST_CONTROLS} or more for a band"]
        )
    if replace(plan.baseline, text="") == replace(plan.candidate, text=""):
        raise ConfigError(
            [
                "both runs are the same training: say what differs, such as --baseline "
                "revision=main or --candidate layout=tp=2"
            ]
        )
    runner.check()
    return runner.compare()


def update_golden(
    plan: Plan, launcher: Launcher, folder: Path, reason: str, progress: Progress
) -> Path:
    """Train the baseline and its control runs, and write them as a golden."""
    if not reason.strip():
        raise ConfigError(["--update-golden needs --reason: why the golden changes"])
    if plan.baseline.path is not None:
        raise ConfigError(["--update-golden trains anew: name no finished run and no golden"])
    runner = Runner(plan, launcher, progress)
    runner.check()
    run = runner.baseline()
    *_, controls = [], *runner.control_runs()
    return save_golden(
        folder, run, [each.curve for each in controls], reason=reason, device=this_device()
    )


def default_ranks() -> int:
    """As run_train.sh chooses: NGPU, the GPUs found, else 2 processes."""
    named = os.environ.get("NGPU", "")
    return int(named) if named.isdecimal() else launch.default_ranks(os.environ)


class Runner:
    """The runs of one plan, each trained when it is first needed."""

    def __init__(self, plan: Plan, launcher: Launcher, progress: Progress) -> None:
        self.launcher, self.progress = launcher, progress
        self._seconds: list[float] = []
        """Of each run that was trained."""
        self.golden: Golden | None = None
        path = plan.baseline.path
        if path is not None and is_golden(path):
            self.golden = find_golden(path, this_device())
            if plan.candidate.path is None:
                plan = self._as_the_golden(plan, self.golden)
        if plan.candidate.path is not None and is_golden(plan.candidate.path):
            raise ConfigError(["a golden is a baseline: name it with --baseline"])
        self.plan = plan

    def check(self) -> None:
        """Everything wrong with the plan that is known before a run; raises ConfigError."""
        lines: list[str] = []
        tokens: dict[str, None] = {}
        steps: set[int] = set()
        for spec in (self.plan.baseline, self.plan.candidate):
            if spec.path is not None:
                continue
            try:
                self.launcher.code(spec)
                if not spec.revision:
                    prepare([*spec.file(), *spec.arguments()], spec.world_size, os.environ)
                job = self._job(spec)
                steps.add(job.training.steps)
                tokens[tokens_in_words(tokens_per_step(job))] = None
                if not spec.revision:
                    words = [*spec.file(), *spec.arguments(*self._words(spec))]
                    prepare(words, spec.world_size, os.environ)
            except ConfigError as error:
                lines += [line for line in error.lines if line not in lines]
        if len(steps) > 1 and self.plan.steps is None:
            different = " and ".join(map(str, sorted(steps)))
            lines.append(f"training.steps: {different}: the learning rate follows it; use --steps")
        if len(tokens) > 1:
            lines.append(
                f"tokens per step: {' and '.join(tokens)}: set training.global_batch_size and "
                "training.seq_len alike"
            )
        if (
            self.plan.num_control_runs
            and self.plan.baseline.path
            and not (self.golden or self.plan.control_paths)
        ):
            self.progress(
                "the baseline is a finished run: without --noise RUN... only bits are compared"
            )
        lines += self._problems()
        if lines:
            raise ConfigError(lines)

    def _problems(self) -> Iterator[str]:
        """What is wrong with the two specs together."""
        plan, finished = self.plan, self.plan.baseline.path is not None
        if plan.num_control_runs < 0:
            yield f"--repeats {plan.num_control_runs} must not be negative"
        if plan.routing and (finished or plan.candidate.path is not None):
            yield "--routing records both runs while they train: name no finished run, no golden"
        elif plan.routing:
            for spec in (plan.baseline, plan.candidate):
                code = self.launcher.code(spec)
                if missing := sorted({_RECORD, _REPLAY} - code.keys):
                    yield f"--routing: {code.description} does not know {', '.join(missing)}"
        specs = [spec.path.resolve() for spec in (plan.baseline, plan.candidate) if spec.path]
        for path in plan.control_paths:
            if not path.exists():
                yield f"--noise {path}: there is no such run"
            elif path.resolve() in specs:
                yield f"--noise {path} is the baseline or the candidate"
        if len({path.resolve() for path in plan.control_paths}) < len(plan.control_paths):
            yield "--noise names a run twice"
        if self.golden is not None and plan.steps not in (None, len(self.golden.run.curve.steps)):
            yield f"--steps {plan.steps}: the golden has {len(self.golden.run.curve.steps)}"

    def compare(self) -> Comparison:
        """The verdict; control runs are trained only if the bits differ."""
        baseline, candidate = self.baseline(), self.candidate()
        caveats = [*self._caveats(), *self._unknown_keys(), *self._changed_files()]
        found = compare_runs(self.plan.title, baseline, candidate, caveats=caveats)
        if found.verdict is not Verdict.UNJUDGED:
            return found
        controls: list[RunRecord] = []
        for controls in self.control_runs():
            found = compare_runs(
                self.plan.title, baseline, candidate, controls=controls, caveats=caveats
            )
            if found.band_check is not None and found.band_check.clear and not self.plan.routing:
                break
        return self._with_routing(found, baseline, controls) if self.plan.routing else found

    def baseline(self) -> RunRecord:
        if self.golden is not None:
            return self.golden.run
        return self._run(self.plan.baseline, "baseline", *self._recorded("baseline"))

    def candidate(self) -> RunRecord:
        return self._run(self.plan.candidate, "candidate", *self._recorded("candidate"))

    def control_runs(self) -> Iterator[list[RunRecord]]:
        """The plan's control runs so far, at each early look, and at last all of them. A golden has
        its own."""
        if self.golden is not None:
            yield [RunRecord(curve.name, curve) for curve in self.golden.controls]
            return
        if self.plan.control_paths:
            yield [read_run(path) for path in self.plan.control_paths]
            return
        spec = self.plan.baseline
        if spec.path is not None or not self.plan.num_control_runs:
            return
        if "debug.permute_rows" not in self.launcher.code(spec).keys:
            spec = replace(spec, revision=self.plan.candidate.revision)
            if "debug.permute_rows" not in self.launcher.code(spec).keys:
                return
        specs = control_specs(
            spec,
            self.plan.num_control_runs,
            layouts=self.plan.control_layouts,
            num_gpus=launch.count_gpus(os.environ),
        )
        self.progress(
            f"the bits differ: up to {len(specs)} control runs measure how much rounding may do"
        )
        controls: list[RunRecord] = []
        for number, (variation, words) in enumerate(specs, 1):
            left = f" ({len(controls)} of {len(specs)} done{self._time_for(specs[number - 1 :])})"
            controls.append(self._run(variation, f"control/{number:02d}", *words, said=left))
            if number in EARLY_LOOKS or number == len(specs):
                yield controls

    def _time_for(self, specs: Sequence[tuple[RunSpec, Words]]) -> str:
        """At the speed of the runs that were trained so far; empty before the first."""
        if not self._seconds:
            return ""
        minutes, seconds = divmod(round(mean(self._seconds) * len(specs)), 60)
        return f", at most {minutes} min {seconds} s left"

    def _run(self, spec: RunSpec, name: str, *more: tuple[str, str], said: str = "") -> RunRecord:
        if spec.path is not None:
            return read_run(spec.path)
        words = (*self._words(spec), *self._seed, *more)
        order = " (rows in another order)" if "debug.permute_rows" in dict(words) else ""
        done = ", done before" if self.launcher.has(spec, name, *words) else said
        self.progress(f"{name}: {spec.text or 'working tree'}{order}{done}")
        started = time.monotonic()
        record = self.launcher.run(spec, name, *words)
        if done == said:
            self._seconds.append(time.monotonic() - started)
        return record

    def _words(self, spec: RunSpec) -> Words:
        """Keys that every run gets, whatever its spec says."""
        job = self._job(spec)
        # What its configuration starts from, it starts from; nothing is saved.
        loads = bool(job.checkpoint.initial_load_path or job.checkpoint.initial_load_in_hf)
        return (
            *batch_words(spec, job),
            *self._steps(),
            ("metrics.log_freq", "1"),
            ("metrics.log_expert_counts", "true"),
            ("metrics.log_parameter_norms", str(self.plan.norms).lower()),
            ("checkpoint.enable", str(loads).lower()),
            ("checkpoint.load_only", str(loads).lower()),
        )

    def _job(self, spec: RunSpec) -> JobConfig:
        """The job of a spec; where it leaves the global batch open, with the baseline's."""
        first = self.plan.baseline if self.plan.baseline.path is None else spec
        return spec.job(rows=first.job().training.global_batch_size)

    def _steps(self) -> Words:
        return () if self.plan.steps is None else (("training.steps", str(self.plan.steps)),)

    @cached_property
    def _seed(self) -> Words:
        """One seed checkpoint for both runs, unless the configuration names what to start from,
        or one of them is finished: initial weights are the same bits in any layout anyway."""
        baseline, candidate = self.plan.baseline, self.plan.candidate
        if baseline.path is not None or candidate.path is not None:
            return ()
        load_only = ("checkpoint.enable", "true"), ("checkpoint.load_only", "true")
        sections = [self._job(spec).checkpoint for spec in (baseline, candidate)]
        if any(each.initial_load_path or each.initial_load_in_hf for each in sections):
            return ()
        self.progress("seed checkpoint")
        path = self.launcher.seed(baseline, "seed", *self._words(baseline))
        return (*load_only, ("checkpoint.initial_load_path", str(path)))

    def _recorded(self, name: str) -> Words:
        if not self.plan.routing:
            return ()
        return ((_RECORD, str(self._routing(name))),)

    def _routing(self, name: str) -> Path:
        return (self.launcher.folder / name / "routing").resolve()

    def _with_routing(
        self, found: Comparison, baseline: RunRecord, controls: Sequence[RunRecord]
    ) -> Comparison:
        diff = routing_diff(self._routing("baseline"), self._routing("candidate"))
        words = (_REPLAY, str(self._routing("baseline")))
        replayed = self._run(self.plan.candidate, "candidate-replayed", words)
        title = f"{self.plan.title}, with the baseline's routing"
        again = compare_runs(title, baseline, replayed, controls=controls)
        return replace(found, routing_diff=diff, replayed=again)

    def _caveats(self) -> list[str]:
        return [] if self.golden is None else self.golden.caveats(device=this_device())

    def _unknown_keys(self) -> Iterator[str]:
        """Keys that a revision does not have."""
        for spec in (self.plan.baseline, self.plan.candidate):
            if spec.path is None:
                code = self.launcher.code(spec)
                wanted = {key for key, _ in self._words(spec)}
                if missing := sorted(wanted - code.keys):
                    yield f"{code.description} does not know {', '.join(missing)}"
                if spec is self.plan.baseline and "debug.permute_rows" not in code.keys:
                    said = "has no debug.permute_rows: the candidate's code made the control runs"
                    yield f"{code.description} {said}"

    def _changed_files(self) -> Iterator[str]:
        """Configuration files that a revision has otherwise: only the code is compared."""
        for spec in (self.plan.baseline, self.plan.candidate):
            if spec.path is None and spec.config is not None and spec.revision:
                code = self.launcher.code(spec)
                if code.has_another(spec.config):
                    yield (
                        f"{code.description} has another {spec.config.name}, and was run with the "
                        f"working tree's: to compare the files too, save its own under another "
                        "name and say config=THAT_FILE beside revision="
                    )

    def _as_the_golden(self, plan: Plan, golden: Golden) -> Plan:
        """The candidate trains what the golden did, but for its own keys."""
        config = golden.write_config(self.launcher.folder / "golden.toml").resolve()
        candidate = plan.candidate
        if candidate.config is not None:
            raise ConfigError(
                [f"{golden.path} has its own configuration: leave {candidate.config} out"]
            )
        return replace(plan, candidate=replace(candidate, config=config))
