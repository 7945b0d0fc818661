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
from titan_moe.verify.compare.comparison import Comparison
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
from titan_moe.verify.compare.run_spec import RunSpec, Words
from titan_moe.verify.compare.trial import Trial
from titan_moe.verify.compare.trial_checks import (
    control_problems,
    cost_problems,
    place_problems,
)
from titan_moe.verify.compare.verdict import ENOUGH, compare_runs

Progress = Callable[[str], None]
"""Prints a line of progress."""


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
    run = runner.baseline()
    *_, controls = [], *runner.control_runs()
    # A CPU's name and capability do not say how fast it is.
    if run.facts["device"] != "cpu" and len(run.steps) >= cost.FEWEST_STEPS:
        alike = [each for each in (run, *controls) if each.facts["layout"] == run.facts["layout"]]
        run = replace(run, facts={**run.facts, "costs": cost.measure(alike[: cost.PAIRS])})
    return save_golden(folder, run, controls, reason=reason)


def _too_few_gpus(ranks: int, job: JobConfig) -> list[str]:
    """Returns a line where an allocation, or this machine, has GPUs but fewer than ranks."""
    nodes = num_nodes()
    gpus = nodes * launch.count_gpus(os.environ)
    if not 0 < gpus < ranks or job.comm.share_gpus:
        return []
    remedy = "choose a smaller layout, or set comm.share_gpus=true to test one"
    return [f"ranks={ranks}: {gpus} GPUs on {nodes} node(s): {remedy}"]


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
        """Check the comparison, and add its trainings to a forecast. Raises ConfigError with a line
        for everything wrong."""
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
        lines, pair = list(more), (self.trial.baseline, self.trial.candidate)
        tokens: dict[str, None] = {}
        steps: set[int] = set()
        checked: list[JobConfig] = []
        for spec in [spec for spec in pair if spec.path is None]:
            try:
                code = self.launcher.code(spec)
                job = self._job(spec)
                steps.add(job.training.steps)
                tokens[tokens_in_words(tokens_per_step(job))] = None
                lines += _too_few_gpus(spec.world_size, job)
                if not spec.revision:
                    words = [*spec.file(), *spec.arguments(*self._words(spec))]
                    words += ["--job.dump_folder", str(self.launcher.folder.resolve() / "none")]
                    before = Path.cwd()
                    os.chdir(code.folder)  # As the run: relative paths begin there.
                    try:
                        check_all(words, spec.world_size, 1, os.environ)
                    finally:
                        os.chdir(before)
                checked.append(job)
            except ConfigError as error:
                lines += [line for line in error.lines if line not in lines]
        if len(steps) > 1 and self.trial.steps is None:
            different = " and ".join(map(str, sorted(steps)))
            lines.append(f"training.steps: {different}: the learning rate follows it; use --steps")
        if len(tokens) > 1:
            lines.append(
                f"tokens per step: {' and '.join(tokens)}: set training.global_batch_size and "
                "training.seq_len alike"
            )
        if self.golden is not None:
            own = len(self.golden.run.steps)
            if self.trial.steps not in (None, own):
                lines.append(f"--steps {self.trial.steps}: the golden has {own}")
        elif self.trial.baseline.path is not None and self.trial.num_control_runs:
            self.progress("the baseline is a finished run: only bits are compared")
        lines += control_problems(self.trial)
        if self.trial.limits and (self.trial.steps or steps):
            lines += cost_problems(
                self.trial, self.golden, self.trial.steps or min(steps, default=0)
            )
        if self.trial.pin_routing and any(spec.path is not None for spec in pair):
            lines.append("--pin-routing trains both runs: name no finished run and no golden")
        elif self.trial.pin_routing and len(checked) == len(pair):
            lines += self._routing_problems(*checked)
        if lines:
            raise ConfigError(lines)

    def compare(self) -> Comparison:
        """Returns the verdict; control runs are trained only if the bits differ. With pinned routes
        returns the pinned one; equal bits with free routes need no pinned runs."""
        if self.trial.pin_routing:
            size_mb = record_bytes(self._job(self.trial.baseline)) / 1e6
            self.progress(f"both runs record their routes: {size_mb:,.3g} MB a step")
        pairs = [(self.baseline(at), self.candidate(at)) for at in self._folders()]
        baseline, candidate = pairs[0]
        costs = self._costs(pairs)
        free, _ = self._judge(baseline, candidate)
        if not self.trial.pin_routing:
            return replace(free, costs=costs)
        if free.verdict is Verdict.IDENTICAL:
            return replace(free, free=free, costs=costs)
        candidate = self._run(self.trial.candidate, "pinned/candidate", *self._routes)
        found, controls = self._judge(baseline, candidate, *self._routes)
        flips = [read_flips(run) for run in (candidate, *controls)]
        # Of all or none: the first are the candidate's.
        known = [each for each in flips if each is not None and None not in flips]
        return replace(found, free=free, flips=known, costs=costs)

    def _judge(
        self, baseline: RunRecord, candidate: RunRecord, *routes: tuple[str, str]
    ) -> tuple[Comparison, list[RunRecord]]:
        """Returns the verdict and its control runs, which follow `routes` if there are any."""
        pair, controls = (baseline, candidate), list[RunRecord]()
        caveats = [] if self.golden is None else self.golden.caveats()
        tolerance = self.trial.tolerance
        found = compare_runs(self.trial.title, *pair, tolerance=tolerance, caveats=caveats)
        if found.verdict is Verdict.UNJUDGED:
            for controls in self.control_runs(*routes):
                found = compare_runs(self.trial.title, *pair, controls=controls, caveats=caveats)
                if found.band_check is not None and found.band_check.clear:
                    break
        return found, controls

    def baseline(self, folder: str = "") -> RunRecord:
        if self.golden is not None:
            return self.golden.run
        return self._run(self.trial.baseline, f"{folder}baseline", *self._recorded)

    def candidate(self, folder: str = "") -> RunRecord:
        # Recorded too, for routers run alike in both, compiled or not.
        return self._run(self.trial.candidate, f"{folder}candidate", *self._recorded)

    def _folders(self) -> list[str]:
        """The folder of each pair of runs, with a slash at its end."""
        again = cost.PAIRS if cost.TIME in self.trial.limits else 1
        return ["", *(f"timed/{number}/" for number in range(2, again + 1))]

    def _costs(self, pairs: Sequence[tuple[RunRecord, RunRecord]]) -> list[cost.CostCheck]:
        if not (limits := self.trial.limits):
            return []
        ours, theirs = (cost.measure(runs) for runs in zip(*pairs, strict=True))
        return [cost.CostCheck(key, ours[key], theirs[key], limits[key]) for key in limits]

    @property
    def _recorded(self) -> Words:
        """Keys of runs that record their routes."""
        if not self.trial.pin_routing:
            return ()
        return ("debug.routing_record", ROUTES), ("debug.routing_record_gb", "1e6")

    @cached_property
    def _routes(self) -> Words:
        """Keys of runs that follow the baseline's routes."""
        start = self._initial_weights(write=False)
        place = self._place(self.trial.baseline, "baseline", *start, *self._recorded)
        return (("debug.routing_replay", str(place.folder / ROUTES)),)

    def _routing_problems(self, baseline: JobConfig, candidate: JobConfig) -> list[str]:
        """Returns lines on why the candidate cannot follow the baseline's routes."""
        out, start = self.launcher.folder, self._initial_weights(write=False)
        out.mkdir(parents=True, exist_ok=True)
        places = [self._place(spec, name, *start, *words) for spec, name, words in self._pairs()]
        todo = sum(place.seconds is None for place in places)
        steps = self.trial.steps or baseline.training.steps
        return routing_problems(baseline, candidate, steps, todo, out)

    def control_runs(self, *routes: tuple[str, str]) -> Iterator[list[RunRecord]]:
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
            for spec, name, words in self.control_trainings(*routes):
                controls.append(self._run(spec, name, *words))
                if len(controls) in (*EARLY_LOOKS, number):
                    yield controls

    def control_trainings(self, *routes: tuple[str, str]) -> list[tuple[RunSpec, str, Words]]:
        """Returns spec, name and keys of each control run."""
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

    def _pairs(self) -> list[tuple[RunSpec, str, Words]]:
        """Returns spec, name and keys of each run that is compared, with free routes."""
        both = (self.trial.baseline, "baseline"), (self.trial.candidate, "candidate")
        keys, folders = self._recorded, self._folders()
        return [(spec, f"{folder}{name}", keys) for folder in folders for spec, name in both]

    def _trainings(self) -> Iterator[Training]:
        """Yields every training that the verdict may need; the seed checkpoint is none."""
        trial, start, runs = self.trial, self._initial_weights(write=False), self._pairs()
        if trial.baseline.path is None:
            runs += self.control_trainings()
        if trial.pin_routing:
            runs.append((trial.candidate, "pinned/candidate", self._routes))
            runs += self.control_trainings(*self._routes)
        for spec, name, words in runs:
            if spec.path is None:
                job = self._job(spec)
                steps = trial.steps or job.training.steps
                flops = model_flops_per_token(model_of_job(job.model), job.training.seq_len)
                tokens = tokens_per_step(job)[1] * steps
                yield Training(self._place(spec, name, *start, *words), steps, flops * tokens)

    def _place(self, spec: RunSpec, name: str, *words: tuple[str, str]) -> Place:
        """Returns where a run of this name trains. Where time is judged it is trained in any case,
        and so is one that follows the routes of a timed one."""
        fresh = cost.TIME in self.trial.limits and not name.startswith("control/")
        return self.launcher.place(spec, name, *self._words(spec), *words, fresh=fresh)

    def _run(self, spec: RunSpec, name: str, *words: tuple[str, str]) -> RunRecord:
        if spec.path is not None:
            return read_run(spec.path)
        order = " (sequences in another order)" if "debug.permute_rows" in dict(words) else ""
        place = self._place(spec, name, *self._seed, *words)
        with self.forecast.training(place) as number:
            self.progress(f"{number}{name}: {spec.text or 'working tree'}{order}")
            return self.launcher.run(place)

    def _words(self, spec: RunSpec) -> Words:
        """Keys that every run gets, whatever its spec says."""
        job = self._job(spec)
        # A configuration's own start stays; nothing is saved.
        loads = bool(job.checkpoint.initial_load_path or job.checkpoint.initial_load_in_hf)
        steps = () if self.trial.steps is None else (("training.steps", str(self.trial.steps)),)
        return (
            *batch_words(spec, job),
            *steps,
            ("metrics.log_freq", "1"),
            ("metrics.log_expert_counts", "true"),
            ("checkpoint.enable", str(loads).lower()),
            ("checkpoint.load_only", str(loads).lower()),
        )

    def _job(self, spec: RunSpec) -> JobConfig:
        """The job of a spec; where it leaves the global batch open, with the baseline's."""
        first = self.trial.baseline if self.trial.baseline.path is None else spec
        return spec.job(global_batch=first.job().training.global_batch_size)

    @cached_property
    def _seed(self) -> Words:
        """Writes the runs' seed checkpoint, if they need one; returns the keys that load it."""
        return self._initial_weights(write=True)

    def _initial_weights(self, *, write: bool) -> Words:
        """One seed checkpoint for both runs, unless the configuration names another start, or one
        of them is finished: initial weights are the same bits in any layout anyway.

        Args:
            write: the seed checkpoint, if it is not there.
        """
        baseline, candidate = self.trial.baseline, self.trial.candidate
        if not self.trial.seed:
            return (("metrics.log_initial_weights", "true"),)
        if baseline.path is not None or candidate.path is not None:
            return ()
        load_only = ("checkpoint.enable", "true"), ("checkpoint.load_only", "true")
        sections = [self._job(spec).checkpoint for spec in (baseline, candidate)]
        if any(each.initial_load_path or each.initial_load_in_hf for each in sections):
            return ()
        switches = ("checkpoint.enable", "true"), ("checkpoint.create_seed_checkpoint", "true")
        place = self.launcher.place(baseline, "seed", *self._words(baseline), *switches)
        if write:
            self.progress("seed checkpoint")
            self.launcher.ensure(place)
        path = place.folder / "checkpoint" / "step-0"
        return (*load_only, ("checkpoint.initial_load_path", str(path)))

    def _with_config_of(self, golden: Golden, trial: Trial) -> Trial:
        """The candidate trains the golden's configuration, but for the keys that it names."""
        config = golden.write_config(self.launcher.folder / "golden.toml").resolve()
        candidate = trial.candidate
        if candidate.config is not None:
            raise ConfigError(
                f"{golden.path} has its own configuration: leave {candidate.config} out"
            )
        return replace(trial, candidate=replace(candidate, config=config))
