"""A comparison from beginning to end: a seed checkpoint, two runs, control runs, a verdict.

`verify losses` runs it. `verdict.compare_runs` decides, by the band of `noise/band.py`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.training_stages import tokens_in_words, tokens_per_step
from titan_moe.models.hf import model_of_job
from titan_moe.prepare.job import check_all
from titan_moe.runtime import launch
from titan_moe.training.run_log import model_flops_per_token
from titan_moe.verify.compare import cost
from titan_moe.verify.compare.control_runs import batch_words, control_specs
from titan_moe.verify.compare.forecast import Forecast, Training
from titan_moe.verify.compare.goldens import Golden, find_golden, is_golden, save_golden
from titan_moe.verify.compare.launch import Launcher, Place, num_nodes
from titan_moe.verify.compare.noise.band import EARLY_LOOKS, FEWEST_CONTROLS
from titan_moe.verify.compare.pinned_routes import (
    ROUTES,
    read_flips,
    record_bytes,
    routing_problems,
)
from titan_moe.verify.compare.records import RunRecord, Verdict, read_run
from titan_moe.verify.compare.run_spec import RunSpec, Words, words_of
from titan_moe.verify.compare.trial import Trial, cost_problems, place_problems, trial_problems
from titan_moe.verify.compare.verdict import ENOUGH, Comparison, compare_runs

Progress = Callable[[str], None]
"""Prints a line of progress."""
Run = tuple[RunSpec, str, Words]
"""A run of a comparison: its spec, its name there, and keys besides those that all runs get."""


def compare(trial: Trial, launcher: Launcher, progress: Progress = print) -> Comparison:
    """Trains the runs that are not there yet, and compares.

    Raises ConfigError for runs that cannot be compared, TrainingError for a run that failed.
    """
    runner, forecast = Runner(trial, launcher, progress), Forecast()
    runner.prepare(forecast)
    progress(forecast.line())
    return runner.compare()


def update_golden(
    trial: Trial, launcher: Launcher, folder: Path, reason: str, progress: Progress
) -> Path:
    """Trains the baseline and its control runs, and writes them as a golden."""
    if not reason.strip():
        raise ConfigError("--update-golden needs --reason: why the golden changes")
    if trial.baseline.path is not None:
        raise ConfigError("--update-golden trains anew: name no finished run and no golden")
    if trial.pin_routing or trial.limits:
        raise ConfigError("--update-golden compares nothing: leave --pin-routing and limits out")
    runner = Runner(trial, launcher, progress)
    runner.check()
    run = runner._run(*runner._pairs()[0])
    *_, controls = [], *runner.control_runs()
    # A CPU's name and capability do not say how fast it is.
    if run.facts["device"] != "cpu" and len(run.steps) >= cost.FEWEST_STEPS:
        alike = [each for each in (run, *controls) if each.facts["layout"] == run.facts["layout"]]
        run = replace(run, facts={**run.facts, "costs": cost.measure(alike[: cost.PAIRS])})
    return save_golden(folder, run, controls, reason=reason)


class Runner:
    """The runs of one trial, each trained when it is first needed."""

    def __init__(self, trial: Trial, launcher: Launcher, progress: Progress) -> None:
        self.launcher, self.progress = launcher, progress
        self.forecast = Forecast()
        self.golden: Golden | None = None
        path = trial.baseline.path
        if path is not None and is_golden(path):
            self.golden = find_golden(path)
            if trial.candidate.path is None:
                trial = self._with_config_of(self.golden, trial)
        if trial.candidate.path is not None and is_golden(trial.candidate.path):
            raise ConfigError("a golden is a baseline: name it with --baseline")
        self.trial = trial

    def prepare(self, forecast: Forecast) -> None:
        """Checks the comparison, and adds its trainings to a forecast. Raises ConfigError with a
        line for everything wrong."""
        trial, lines = self.trial, []
        if 0 < trial.num_control_runs < FEWEST_CONTROLS:
            lines.append(f"repeats={trial.num_control_runs}: 0, or {FEWEST_CONTROLS} or more")
        if replace(trial.baseline, text="") == replace(trial.candidate, text=""):
            lines.append(
                f"baseline={trial.baseline.text!r} and candidate={trial.candidate.text!r} are the "
                "same training: say what differs, such as revision=main or layout=tp=2"
            )
        self.check(*lines)
        if 0 < (few := trial.num_control_runs) < ENOUGH and trial.baseline.path is None:
            wide = "if the bits differ, their band may be too wide for a verdict"
            self.progress(f"{trial.title}: repeats={few}: {wide}: take {ENOUGH} or more")
        elif trial.num_control_runs and trial.baseline.path is not None and self.golden is None:
            self.progress("the baseline is a finished run: only bits are compared")
        trainings = list(self._trainings())
        if lines := place_problems(trial, [each.place.folder for each in trainings]):
            raise ConfigError(lines)
        self.forecast = forecast
        forecast.add(trial.title, trainings)

    def check(self, *more: str) -> None:
        """Raises ConfigError with a line for everything wrong that is known before a run.

        Args:
            more: lines of the caller's.
        """
        lines, jobs = [*more, *trial_problems(self.trial)], []
        specs = [s for s in (self.trial.baseline, self.trial.candidate) if s.path is None]
        for spec in specs:
            try:
                jobs.append(self._checked(spec))
            except ConfigError as error:
                lines += [line for line in error.lines if line not in lines]
        if len(jobs) == len(specs):
            lines += self._pair_problems(jobs)
        if lines:
            raise ConfigError(lines)

    def _checked(self, spec: RunSpec) -> JobConfig:
        """Returns the job of a run that its own checks pass; those of another revision are left to
        its code."""
        code, job, ranks = self.launcher.code(spec), self._job(spec), spec.world_size
        nodes = num_nodes()
        gpus = nodes * launch.count_gpus(os.environ)
        if 0 < gpus < ranks and not job.comm.share_gpus:
            remedy = "choose a smaller layout, or set comm.share_gpus=true to test one"
            raise ConfigError(f"ranks={ranks}: {gpus} GPUs on {nodes} node(s): {remedy}")
        if not spec.revision:
            words = [*spec.file(), *spec.arguments(*self._words(spec))]
            words += ["--job.dump_folder", str(self.launcher.folder.resolve() / "none")]
            before = Path.cwd()
            os.chdir(code.folder)  # As the run: relative paths begin there.
            try:
                check_all(words, ranks, 1, os.environ)
            finally:
                os.chdir(before)
        return job

    def _pair_problems(self, jobs: Sequence[JobConfig]) -> Iterator[str]:
        """Yields lines on why the trial's trainings cannot be compared.

        Args:
            jobs: those of the runs to be trained, none for a finished one.
        """
        trial = self.trial
        steps = sorted({job.training.steps for job in jobs})
        if len(steps) > 1:
            different = " and ".join(map(str, steps))
            yield f"training.steps: {different}: the learning rate follows it; use --steps"
        tokens = dict.fromkeys(tokens_in_words(tokens_per_step(job)) for job in jobs)
        if len(tokens) > 1:
            yield (
                f"tokens per step: {' and '.join(tokens)}: set training.global_batch_size and "
                "training.seq_len alike"
            )
        if self.golden is not None and trial.steps not in (None, own := len(self.golden.run.steps)):
            yield f"--steps {trial.steps}: the golden has {own}"
        if trial.limits:
            yield from cost_problems(trial, self.golden, min(steps, default=0))
        if trial.pin_routing and len(jobs) > 1:
            out = self.launcher.folder
            out.mkdir(parents=True, exist_ok=True)
            todo = sum(self._place(*run).seconds is None for run in self._pairs())
            baseline, candidate = jobs
            yield from routing_problems(baseline, candidate, steps[0], todo, out)

    def compare(self) -> Comparison:
        """Returns the verdict; control runs are trained only if the bits differ. With pinned routes
        returns the pinned one; equal bits with free routes need no pinned runs."""
        if self.trial.pin_routing:
            size_mb = record_bytes(self._job(self.trial.baseline)) / 1e6
            self.progress(f"both runs record their routes: {size_mb:,.3g} MB a step")
        runs = self.runs()
        baseline, candidate, *_ = runs
        free, _ = self._judge(baseline, candidate)
        if limits := self.trial.limits:
            ours, theirs = cost.measure(runs[::2]), cost.measure(runs[1::2])
            costs = [cost.CostCheck(key, ours[key], theirs[key], limits[key]) for key in limits]
            free = replace(free, costs=costs)
        if not self.trial.pin_routing:
            return free
        if free.verdict is Verdict.IDENTICAL:
            return replace(free, free=free)
        candidate = self._run(self.trial.candidate, "pinned/candidate", self._routes)
        found, controls = self._judge(baseline, candidate, self._routes)
        flips = [read_flips(run) for run in (candidate, *controls)]
        return replace(found, free=free, flips=flips, costs=free.costs)

    def _judge(
        self, baseline: RunRecord, candidate: RunRecord, routes: Words = ()
    ) -> tuple[Comparison, list[RunRecord]]:
        """Returns the verdict and its control runs, which follow `routes` if there are any."""
        pair, controls = (baseline, candidate), list[RunRecord]()
        caveats = [] if self.golden is None else self.golden.caveats()
        tolerance = self.trial.tolerance
        found = compare_runs(self.trial.title, *pair, tolerance=tolerance, caveats=caveats)
        if found.verdict is Verdict.UNJUDGED:
            for controls in self.control_runs(routes):
                found = compare_runs(self.trial.title, *pair, controls=controls, caveats=caveats)
                if found.band_check is not None and found.band_check.clear:
                    break
        return found, controls

    def runs(self) -> list[RunRecord]:
        """Trains or reads baseline and candidate; three times in turn where time is judged."""
        return [self._run(*each) for each in self._pairs()]

    def control_runs(self, routes: Words = ()) -> Iterator[list[RunRecord]]:
        """Yields the trial's control runs so far at each early look, and at last all of them; those
        of a golden at once."""
        number = self.trial.num_control_runs
        if self.trial.controls:
            yield [read_run(path, name=path.name) for path in self.trial.controls]
        elif self.golden is not None:
            yield self.golden.controls
        elif self.trial.baseline.path is None and number:
            self.progress(
                f"the bits differ: up to {number} control runs measure how much rounding may do"
            )
            controls: list[RunRecord] = []
            for run in self.control_trainings(routes):
                controls.append(self._run(*run))
                if len(controls) in (*EARLY_LOOKS, number):
                    yield controls

    def control_trainings(self, routes: Words = ()) -> list[Run]:
        """Returns the control runs to be trained."""
        found = control_specs(
            self.trial.baseline,
            self.trial.num_control_runs,
            layouts=self.trial.control_layouts,
            num_gpus=launch.count_gpus(os.environ),
        )
        at = "pinned/control" if routes else "control"
        return [
            (spec, f"{at}/{number:02d}", (*words, *routes))
            for number, (spec, words) in enumerate(found, 1)
        ]

    def _pairs(self) -> list[Run]:
        """Returns baseline and candidate with free routes, which both record if they are pinned
        later: routers run alike in both, compiled or not."""
        recorded = ("debug.routing_record", ROUTES), ("debug.routing_record_gb", "1e6")
        keys = recorded if self.trial.pin_routing else ()
        again = cost.PAIRS if cost.TIME in self.trial.limits else 1
        both = (self.trial.baseline, "baseline"), (self.trial.candidate, "candidate")
        folders = ["", *(f"timed/{number}/" for number in range(2, again + 1))]
        return [(spec, f"{folder}{name}", keys) for folder in folders for spec, name in both]

    @cached_property
    def _routes(self) -> Words:
        """Keys of runs that follow the baseline's routes."""
        return (("debug.routing_replay", str(self._place(*self._pairs()[0]).folder / ROUTES)),)

    def _trainings(self) -> Iterator[Training]:
        """Yields every training that the verdict may need; the seed checkpoint is none."""
        trial, runs = self.trial, self._pairs()
        if trial.baseline.path is None:
            runs += self.control_trainings()
        if trial.pin_routing:
            runs.append((trial.candidate, "pinned/candidate", self._routes))
            runs += self.control_trainings(self._routes)
        for spec, name, words in runs:
            if spec.path is None:
                job = self._job(spec)
                steps = job.training.steps
                flops = model_flops_per_token(model_of_job(job.model), job.training.seq_len)
                tokens = tokens_per_step(job)[1] * steps
                yield Training(self._place(spec, name, words), steps, flops * tokens)

    def _place(self, spec: RunSpec, name: str, words: Words) -> Place:
        """Returns where a run of this name trains. Where time is judged it is trained in any case,
        and so is one that follows the routes of a timed one."""
        fresh = cost.TIME in self.trial.limits and not name.startswith("control/")
        words = (*self._words(spec), *self._start, *words)
        return self.launcher.place(spec, name, *words, fresh=fresh)

    def _run(self, spec: RunSpec, name: str, words: Words) -> RunRecord:
        if self.golden is not None and spec is self.trial.baseline:
            return self.golden.run
        if spec.path is not None:
            return read_run(spec.path)
        self._write_seed()
        place = self._place(spec, name, words)
        if place.seconds is None:
            order = " (sequences in another order)" if "debug.permute_rows" in dict(words) else ""
            with self.forecast.training(place) as number:
                self.progress(f"{number}{name}: {spec.text or 'working tree'}{order}")
                self.launcher.train(place)
        return self.launcher.read(place)

    def _words(self, spec: RunSpec) -> Words:
        """Keys that every run gets, whatever its spec says."""
        job = self._job(spec)
        loads = _loads(job)  # A configuration's own start stays; nothing is saved.
        steps = () if self.trial.steps is None else (("training.steps", str(self.trial.steps)),)
        return (
            *batch_words(spec, job),
            *steps,
            *words_of("metrics", log_freq=1, log_expert_counts=True, log_parameter_norms=True),
            *words_of("checkpoint", enable=loads, load_only=loads),
        )

    def _job(self, spec: RunSpec) -> JobConfig:
        """Returns the job of a spec over the trial's steps; where it leaves the global batch open,
        with the baseline's."""
        first = self.trial.baseline if self.trial.baseline.path is None else spec
        job = spec.job(global_batch=first.job().training.global_batch_size)
        return job.with_values(training={"steps": self.trial.steps or job.training.steps})

    @cached_property
    def _start(self) -> Words:
        """Keys of one seed checkpoint for both runs, unless the configuration names another start,
        or one of them is finished: initial weights are the same bits in any layout anyway."""
        pair = self.trial.baseline, self.trial.candidate
        if not self.trial.seed:
            return (("metrics.log_initial_weights", "true"),)
        if any(spec.path is not None or _loads(self._job(spec)) for spec in pair):
            return ()
        path = self._seed().folder / "checkpoint" / "step-0"
        return words_of("checkpoint", enable=True, load_only=True, initial_load_path=path)

    def _seed(self) -> Place:
        spec = self.trial.baseline
        switches = words_of("checkpoint", enable=True, create_seed_checkpoint=True)
        return self.launcher.place(spec, "seed", *self._words(spec), *switches)

    def _write_seed(self) -> None:
        """Writes the seed checkpoint, if runs start from one and it is not there."""
        is_read = "checkpoint.initial_load_path" in dict(self._start)
        if is_read and (place := self._seed()).seconds is None:
            self.progress("seed checkpoint")
            self.launcher.train(place)

    def _with_config_of(self, golden: Golden, trial: Trial) -> Trial:
        """The candidate trains the golden's configuration, but for the keys that it names."""
        config = golden.write_config(self.launcher.folder / "golden.toml").resolve()
        candidate = trial.candidate
        if candidate.config is not None:
            raise ConfigError(
                f"{golden.path} has its own configuration: leave {candidate.config} out"
            )
        return replace(trial, candidate=replace(candidate, config=config))


def _loads(job: JobConfig) -> bool:
    """Says whether a configuration names weights to begin with."""
    return bool(job.checkpoint.initial_load_path or job.checkpoint.initial_load_in_hf)
