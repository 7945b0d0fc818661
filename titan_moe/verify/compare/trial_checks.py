"""Checks of a trial before anything runs: its control runs, its folders and its limits of cost."""

from collections.abc import Sequence
from pathlib import Path

from titan_moe.verify.compare import cost
from titan_moe.verify.compare.goldens import Golden
from titan_moe.verify.compare.noise.band import FEWEST_CONTROLS
from titan_moe.verify.compare.trial import Trial


def control_problems(trial: Trial) -> list[str]:
    """Returns lines on why finished runs cannot be compared, or cannot judge as a tolerance can."""
    lines, seen = [], dict[bytes, Path]()
    if 0 < len(trial.controls) < FEWEST_CONTROLS:
        named = f"--controls: {len(trial.controls)} finished runs"
        lines.append(f"{named}: name {FEWEST_CONTROLS} or more")
    sides = (trial.baseline.path, trial.candidate.path, *trial.controls)
    for path in filter(None, sides):
        file = path if path.is_file() else path / "metrics.jsonl"
        held = file.read_bytes() if file.is_file() else b""
        # Steps of two runs never take the same times: equal files are copies.
        held = held if b'"time/step"' in held else bytes(path.resolve())
        if held in seen:
            lines.append(f"{path} is the same run as {seen[held]}, or its copy: name another one")
        seen[held] = path
    if trial.controls and trial.tolerance:
        lines.append("--controls and --tolerance: both judge: leave one out")
    return lines


def place_problems(trial: Trial, folders: Sequence[Path]) -> list[str]:
    """Returns a line for each finished run that lies in a folder in which a run is trained."""
    sides = (trial.baseline.path, trial.candidate.path, *trial.controls)
    return [
        f"{path}: this comparison trains there: choose another --out"
        for path in filter(None, sides)
        if any(path.resolve().is_relative_to(folder) for folder in folders)
    ]


def cost_problems(trial: Trial, golden: Golden | None, steps: int) -> list[str]:
    """Returns lines on why these runs, of so many steps, cannot be held to limits of cost."""
    lines = []
    what = "max_slowdown and max_memory_growth"
    if trial.candidate.path is not None or (trial.baseline.path is not None and golden is None):
        return [f"{what}: a finished run was timed at another hour: name config=FILE instead"]
    ours, theirs = trial.baseline.world_size, trial.candidate.world_size
    if golden is not None:
        ours = golden.run.facts["world_size"]
        if "costs" not in golden.run.facts:
            lines.append(f"{what}: {golden.path} holds no time and memory (CPUs' hold none)")
        other = "name this machine's golden, or make it with --update-golden"
        lines += [f"{what}: {caveat}: {other}" for caveat in golden.caveats()]
    if ours != theirs:
        lines.append(f"{what}: both runs need as many ranks, not {ours} and {theirs}")
    if steps < cost.FEWEST_STEPS:
        lines.append(f"{what}: {steps} steps, need {cost.FEWEST_STEPS}: set --steps")
    if not all(0 < limit < 1 for limit in trial.limits.values()):
        lines.append(f"{what}: must be shares between 0 and 1: 0.05 is 5 %")
    return lines
