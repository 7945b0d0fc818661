"""A comparison from beginning to end: one seed checkpoint, two sides, their repeats, a verdict."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.launch import count_gpus
from titan_moe.train import prepare
from titan_moe.verify.compare.comparison import Comparison, Verdict
from titan_moe.verify.compare.control_runs import batch_words, harmless_sides
from titan_moe.verify.compare.goldens import (
    Golden,
    find_golden,
    is_golden,
    save_golden,
    this_device,
)
from titan_moe.verify.compare.launch import Launcher
from titan_moe.verify.compare.noise.band import FEWEST_REPEATS
from titan_moe.verify.compare.records import RunRecord, read_run
from titan_moe.verify.compare.routing_diff import routing_flips
from titan_moe.verify.compare.run_spec import Side, Words
from titan_moe.verify.compare.verdict import judge

_RECORD, _REPLAY = "debug.routing_record", "debug.routing_replay"
Tell = Callable[[str], None]
"""Takes a line of progress."""


@dataclass(frozen=True)
class Plan:
    """What is to be compared, and how closely."""

    title: str
    baseline: Side
    candidate: Side
    repeats: int
    """Harmless repeats of the baseline; none: only bits are compared."""
    steps: int | None = None
    """Left out: as the configuration says."""
    harmless: Sequence[str] = ()
    """Layouts of repeats; none: the neighbours of the baseline's own."""
    noise: Sequence[Path] = ()
    """Finished runs to take as repeats instead."""
    norms: bool = False
    """Compare the norm of every parameter's and expert's gradient too."""
    routing: bool = False
    """Record both sides' routings, and train the candidate with the baseline's as well."""


def compare(plan: Plan, launcher: Launcher, tell: Tell = print) -> Comparison:
    """Run what has to be run, and judge.

    Raises ConfigError for what cannot be compared, SideError for a side that failed.
    """
    experiment = Experiment(plan, launcher, tell)
    if 0 < plan.repeats < FEWEST_REPEATS:
        raise ConfigError([f"--repeats {plan.repeats}: 0, or {FEWEST_REPEATS} or more for a band"])
    if replace(plan.baseline, text="") == replace(plan.candidate, text=""):
        raise ConfigError(
            [
                "both sides are the same training: say what differs, such as --baseline "
                "revision=main or --candidate layout=tp=2"
            ]
        )
    experiment.check()
    return experiment.compare()


def update_golden(plan: Plan, launcher: Launcher, folder: Path, reason: str, tell: Tell) -> Path:
    """Run the baseline and its repeats, and write them as a golden."""
    if not reason.strip():
        raise ConfigError(["--update-golden needs --reason: why the golden changes"])
    if plan.baseline.path is not None:
        raise ConfigError(["--update-golden trains anew: name no finished run and no golden"])
    experiment = Experiment(plan, launcher, tell)
    experiment.check()
    run, repeats = experiment.baseline(), experiment.repeats()
    return save_golden(
        folder, run, [each.curve for each in repeats], reason=reason, device=this_device()
    )


def default_ranks() -> int:
    """As run_train.sh chooses: NGPU, the GPUs found, else 2 processes."""
    named = os.environ.get("NGPU", "")
    return int(named) if named.isdecimal() else count_gpus(os.environ) or 2


class Experiment:
    """The runs of one plan, each made when it is asked for."""

    def __init__(self, plan: Plan, launcher: Launcher, tell: Tell) -> None:
        self.launcher, self.tell = launcher, tell
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
        """Everything wrong with the sides that is known before a run; raises ConfigError."""
        lines: list[str] = []
        tokens: set[int] = set()
        steps: set[int] = set()
        for side in (self.plan.baseline, self.plan.candidate):
            if side.path is not None:
                continue
            try:
                self.launcher.code(side)
                if not side.revision:
                    prepare([*side.file(), *side.arguments()], side.world_size, os.environ)
                job = self._job(side)
                steps.add(job.training.steps)
                tokens.add(job.training.global_batch_size * job.training.seq_len)
                if not side.revision:
                    words = [*side.file(), *side.arguments(*self._words(side))]
                    prepare(words, side.world_size, os.environ)
            except ConfigError as error:
                lines += [line for line in error.lines if line not in lines]
        if len(steps) > 1 and self.plan.steps is None:
            told = " and ".join(map(str, sorted(steps)))
            lines.append(f"training.steps: {told}: the learning rate follows it; use --steps")
        if len(tokens) > 1:
            lines.append(
                f"tokens per step: {' and '.join(f'{each:,}' for each in sorted(tokens))}: set "
                "training.global_batch_size and training.seq_len alike"
            )
        if self.plan.repeats and self.plan.baseline.path and not (self.golden or self.plan.noise):
            self.tell("the baseline is a finished run: without --noise RUN... only bits are judged")
        lines += self._problems()
        if lines:
            raise ConfigError(lines)

    def _problems(self) -> Iterator[str]:
        """What no side can know alone."""
        plan, finished = self.plan, self.plan.baseline.path is not None
        if plan.repeats < 0:
            yield f"--repeats {plan.repeats} must not be negative"
        if plan.routing and (finished or plan.candidate.path is not None):
            yield "--routing records both sides while they train: name no finished run, no golden"
        elif plan.routing:
            for side in (plan.baseline, plan.candidate):
                code = self.launcher.code(side)
                if missing := sorted({_RECORD, _REPLAY} - code.keys):
                    yield f"--routing: {code.told} does not know {', '.join(missing)}"
        sides = [side.path.resolve() for side in (plan.baseline, plan.candidate) if side.path]
        for path in plan.noise:
            if not path.exists():
                yield f"--noise {path}: there is no such run"
            elif path.resolve() in sides:
                yield f"--noise {path} is one of the sides"
        if len({path.resolve() for path in plan.noise}) < len(plan.noise):
            yield "--noise names a run twice"
        if self.golden is not None and plan.steps not in (None, len(self.golden.run.curve.steps)):
            yield f"--steps {plan.steps}: the golden has {len(self.golden.run.curve.steps)}"

    def compare(self) -> Comparison:
        """The verdict; repeats are made only if the bits differ."""
        baseline, candidate = self.baseline(), self.candidate()
        caveats = [*self._caveats(), *self._unknown_keys()]
        found = judge(self.plan.title, baseline, candidate, caveats=caveats)
        if found.verdict is Verdict.UNJUDGED:
            repeats = self.repeats()
            found = judge(self.plan.title, baseline, candidate, repeats=repeats, caveats=caveats)
            if self.plan.routing:
                found = self._with_routing(found, baseline, repeats)
        return found

    def baseline(self) -> RunRecord:
        if self.golden is not None:
            return self.golden.run
        return self._run(self.plan.baseline, "baseline", *self._recorded("baseline"))

    def candidate(self) -> RunRecord:
        return self._run(self.plan.candidate, "candidate", *self._recorded("candidate"))

    def repeats(self) -> list[RunRecord]:
        """The harmless ones; a golden has its own."""
        if self.golden is not None:
            return [RunRecord(curve.name, curve) for curve in self.golden.repeats]
        if self.plan.noise:
            return [read_run(path) for path in self.plan.noise]
        side = self.plan.baseline
        if side.path is not None or not self.plan.repeats:
            return []
        if "debug.permute_rows" not in self.launcher.code(side).keys:
            side = replace(side, revision=self.plan.candidate.revision)
            if "debug.permute_rows" not in self.launcher.code(side).keys:
                return []
        sides = harmless_sides(
            side,
            self.plan.repeats,
            layouts=self.plan.harmless,
            num_gpus=count_gpus(os.environ),
        )
        self.tell(f"the bits differ: {len(sides)} harmless repeats tell how much rounding may do")
        return [
            self._run(turn, f"repeats/{number:02d}", *words)
            for number, (turn, words) in enumerate(sides, 1)
        ]

    def _run(self, side: Side, name: str, *more: tuple[str, str]) -> RunRecord:
        if side.path is not None:
            return read_run(side.path)
        words = (*self._words(side), *self._seed, *more)
        order = " (rows in another order)" if "debug.permute_rows" in dict(words) else ""
        done = ", done before" if self.launcher.has(side, name, *words) else ""
        self.tell(f"{name}: {side.text or 'working tree'}{order}{done}")
        return self.launcher.run(side, name, *words)

    def _words(self, side: Side) -> Words:
        """What every run is told, whatever its side says."""
        job = self._job(side)
        # What its configuration starts from, it starts from; nothing is saved.
        loads = bool(job.checkpoint.initial_load_path or job.checkpoint.initial_load_in_hf)
        return (
            *batch_words(side, job),
            *self._steps(),
            ("metrics.log_freq", "1"),
            ("metrics.log_expert_counts", "true"),
            ("metrics.log_parameter_norms", str(self.plan.norms).lower()),
            ("checkpoint.enable", str(loads).lower()),
            ("checkpoint.load_only", str(loads).lower()),
        )

    def _job(self, side: Side) -> JobConfig:
        """A side's configuration; where it leaves the global batch open, with the baseline's."""
        first = self.plan.baseline if self.plan.baseline.path is None else side
        return side.job(rows=first.job().training.global_batch_size)

    def _steps(self) -> Words:
        return () if self.plan.steps is None else (("training.steps", str(self.plan.steps)),)

    @cached_property
    def _seed(self) -> Words:
        """One seed checkpoint for both sides, unless the configuration names what to start from,
        or one of them is finished: initial weights are the same bits in any layout anyway."""
        baseline, candidate = self.plan.baseline, self.plan.candidate
        if baseline.path is not None or candidate.path is not None:
            return ()
        load_only = ("checkpoint.enable", "true"), ("checkpoint.load_only", "true")
        sections = [self._job(side).checkpoint for side in (baseline, candidate)]
        if any(each.initial_load_path or each.initial_load_in_hf for each in sections):
            return ()
        self.tell("seed checkpoint")
        path = self.launcher.seed(baseline, "seed", *self._words(baseline))
        return (*load_only, ("checkpoint.initial_load_path", str(path)))

    def _recorded(self, name: str) -> Words:
        if not self.plan.routing:
            return ()
        return ((_RECORD, str(self._routing(name))),)

    def _routing(self, name: str) -> Path:
        return (self.launcher.folder / name / "routing").resolve()

    def _with_routing(
        self, found: Comparison, baseline: RunRecord, repeats: Sequence[RunRecord]
    ) -> Comparison:
        flips = routing_flips(self._routing("baseline"), self._routing("candidate"))
        words = (_REPLAY, str(self._routing("baseline")))
        replayed = self._run(self.plan.candidate, "candidate-replayed", words)
        title = f"{self.plan.title}, with the baseline's routing"
        again = judge(title, baseline, replayed, repeats=repeats)
        return replace(found, flips=flips, replayed=again)

    def _caveats(self) -> list[str]:
        return [] if self.golden is None else self.golden.caveats(device=this_device())

    def _unknown_keys(self) -> Iterator[str]:
        """Of revisions that cannot be asked for everything."""
        for side in (self.plan.baseline, self.plan.candidate):
            if side.path is None:
                code = self.launcher.code(side)
                wanted = {key for key, _ in self._words(side)}
                if missing := sorted(wanted - code.keys):
                    yield f"{code.told} does not know {', '.join(missing)}"
                if side is self.plan.baseline and "debug.permute_rows" not in code.keys:
                    yield f"{code.told} cannot be repeated harmlessly: the candidate's code was"

    def _as_the_golden(self, plan: Plan, golden: Golden) -> Plan:
        """The candidate trains what the golden did, but for its own words."""
        config = golden.write_config(self.launcher.folder / "golden.toml").resolve()
        candidate = plan.candidate
        if candidate.config is not None:
            raise ConfigError(
                [f"{golden.path} has its own configuration: leave {candidate.config} out"]
            )
        return replace(plan, candidate=replace(candidate, config=config))
