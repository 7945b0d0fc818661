"""A trial is what a comparison is asked for: two runs, their control runs, and limits; and what is
wrong with one before anything runs."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_moe.runtime import launch
from titan_moe.verify.compare import cost
from titan_moe.verify.compare.goldens import Golden
from titan_moe.verify.compare.launch import num_nodes
from titan_moe.verify.compare.noise.band import FEWEST_CONTROLS
from titan_moe.verify.compare.run_spec import RunSpec, parse_run_spec


@dataclass(frozen=True)
class Trial:
    """Two runs to compare, and how closely."""

    title: str
    baseline: RunSpec
    candidate: RunSpec
    num_control_runs: int
    """Variations of the baseline; 0: only bits are compared."""
    steps: int | None = None
    """Left out: as the configuration says."""
    controls: Sequence[Path] = ()
    """Finished control runs; with them, as with a tolerance, num_control_runs is 0."""
    tolerance: Mapping[str, float] | None = None
    """Largest relative differences by scalar, which judge in place of control runs."""
    control_layouts: Sequence[str] = ()
    """Layouts of control runs; empty: the neighbours of the baseline's layout."""
    seed: bool = True
    """Start all runs from one seed checkpoint; False: from weights that each draws itself, and
    refuse runs whose checksums differ."""
    max_slowdown: float | None = None
    """Largest growth of the time per step, as a share; None: time is not judged."""
    max_memory_growth: float | None = None
    """Largest growth of the memory, as a share; None: memory is not judged."""
    pin_routing: bool = False
    """Compare twice: with free routes, and with those of the baseline in all runs."""

    @property
    def limits(self) -> dict[str, float]:
        """Limits of costs by quantity."""
        both = {cost.TIME: self.max_slowdown, cost.MEMORY: self.max_memory_growth}
        return {quantity: limit for quantity, limit in both.items() if limit is not None}

    @property
    def finished(self) -> list[Path]:
        """Folders of the finished runs among these."""
        return [p for p in (self.baseline.path, self.candidate.path, *self.controls) if p]


def trial_of(title: str, common: RunSpec, baseline: str, candidate: str, **options: Any) -> Trial:
    """Makes the trial of two runs as a user writes them. Raises ConfigError.

    Args:
        common: what a run leaves out.
        options: the other fields of the trial.
    """
    # run_train.sh chooses the same: on each machine NGPU, its GPUs, else 2.
    named = os.environ.get("NGPU", "")
    here = int(named) if named.isdecimal() else launch.default_ranks(os.environ)
    ranks = num_nodes() * here
    first, second = (
        parse_run_spec(text, common, default_ranks=ranks) for text in (baseline, candidate)
    )
    return Trial(title, first, second, **options)


def trial_problems(trial: Trial) -> Iterator[str]:
    """Yields lines on why finished runs cannot be compared, or cannot judge as a tolerance can."""
    seen: dict[bytes, Path] = {}
    if 0 < len(trial.controls) < FEWEST_CONTROLS:
        named = f"--controls: {len(trial.controls)} finished runs"
        yield f"{named}: name {FEWEST_CONTROLS} or more"
    for path in trial.finished:
        file = path if path.is_file() else path / "metrics.jsonl"
        held = file.read_bytes() if file.is_file() else b""
        # Steps of two runs never take the same times: equal files are copies.
        held = held if b'"time/step"' in held else bytes(path.resolve())
        if held in seen:
            yield f"{path} is the same run as {seen[held]}, or its copy: name another one"
        seen[held] = path
    if trial.controls and trial.tolerance:
        yield "--controls and --tolerance: both judge: leave one out"
    if trial.pin_routing and (trial.baseline.path or trial.candidate.path):
        yield "--pin-routing trains both runs: name no finished run and no golden"


def place_problems(trial: Trial, folders: Sequence[Path]) -> list[str]:
    """Returns a line for each finished run that lies in a folder in which a run is trained."""
    return [
        f"{path}: this comparison trains there: choose another --out"
        for path in trial.finished
        if any(path.resolve().is_relative_to(folder) for folder in folders)
    ]


def cost_problems(trial: Trial, golden: Golden | None, steps: int) -> Iterator[str]:
    """Yields lines on why these runs, of so many steps, cannot be held to limits of cost."""
    what = "max_slowdown and max_memory_growth"
    if trial.candidate.path is not None or (trial.baseline.path is not None and golden is None):
        yield f"{what}: a finished run is of another hour: name what to train, config=FILE"
        return
    ours, theirs = trial.baseline.world_size, trial.candidate.world_size
    if golden is not None:
        ours = golden.run.facts["world_size"]
        if "costs" not in golden.run.facts:
            yield f"{what}: {golden.path} holds no cost (of a CPU, none does)"
        other = "name this machine's golden, or make it with --update-golden"
        yield from (f"{what}: {caveat}: {other}" for caveat in golden.caveats())
    if ours != theirs:
        yield f"{what}: both runs need as many ranks, not {ours} and {theirs}"
    if steps < cost.FEWEST_STEPS:
        yield f"{what}: {steps} steps, need {cost.FEWEST_STEPS}: set --steps"
    if not all(0 < limit < 1 for limit in trial.limits.values()):
        yield f"{what}: must be shares between 0 and 1: 0.05 is 5 %"
