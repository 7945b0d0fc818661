"""How often the noise band is wrong: false alarms of harmless runs, and mistakes that it misses.

    python -m scripts.bench.noise_band                     # hours of one core
    python -m scripts.bench.noise_band --runs 40 --dtypes bfloat16

The baseline is that of `titan-moe verify losses --config configs/debug/compare.toml --baseline
ranks=1` on a machine without GPUs. Its control runs come from the same function: the first of them
make the bands; later ones, in orders that no band has seen, are judged by them. So are runs with a
mistake planted in them. The output folder gets every run's curve, and an interrupted script goes on
where it was; at the end results.json, false_alarms.png and detection.png. With --judge, the runs
that are there are judged and none is trained.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from scripts.bench.mistakes import MISTAKES
from scripts.bench.trainings import BFLOAT16, Training, control_trainings, train_each, training_of
from titan_moe.verify.compare.noise.band import (
    CLEARLY,
    EARLY_LOOKS,
    FALSE_ALARMS,
    Band,
    quantities_of,
)
from titan_moe.verify.compare.records import NORM_OF, Curve
from titan_moe.verify.compare.run_spec import RunSpec

CONFIG = Path("configs/debug/compare.toml")
BASELINE = {
    "float32": RunSpec(config=CONFIG, ranks=1),
    "bfloat16": RunSpec(config=CONFIG, ranks=1, overrides=BFLOAT16),
}
NUMBERS_OF_CONTROLS = (6, 12, 24)
MOST_CONTROLS = NUMBERS_OF_CONTROLS[-1]
EARLY_DRAWS = 50
"""Random choices of control runs for the early look, of each size."""
GROUP = 12
FIRST_WRONG = 50001
"""Seed of the first wrong run's row order, which no harmless one has."""


class Task(NamedTuple):
    """One training."""

    dtype: str
    name: str
    training: Training

    def path(self, folder: Path) -> Path:
        safe = "".join(c if c.isalnum() else "_" for c in self.name)
        return folder / "curves" / self.dtype / f"{safe}.npz"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", choices=list(BASELINE), default=list(BASELINE))
    parser.add_argument("--runs", type=int, default=150, help="unseen harmless ones of each type")
    parser.add_argument("--out", type=Path, default=Path("outputs/noise_band"))
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time")
    parser.add_argument("--judge", action="store_true", help="train nothing")
    options = parser.parse_args(argv)
    every = tasks(options.dtypes, options.runs)
    todo = [t for t in every if not options.judge and not t.path(options.out).exists()]
    with (
        tqdm(total=len(todo), unit="run", dynamic_ncols=True) as bar,
        ThreadPoolExecutor(options.workers) as pool,  # They wait: the ranks are processes.
    ):
        for number in pool.map(partial(train_group, folder=options.out), groups(todo)):
            bar.update(number)
    found = [judge(options.out, dtype, options.runs) for dtype in options.dtypes]
    (options.out / "results.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print_tables(found)
    draw_false_alarms(found, options.out / "false_alarms.png")
    draw_detection(found, options.out / "detection.png")
    return 0


def groups(todo: Sequence[Task]) -> list[list[Task]]:
    """A few at a time in the same processes, in much the same order."""
    found: list[list[Task]] = []
    filling: dict[int, list[Task]] = {}
    for task in todo:
        group = filling.setdefault(task.training.world_size, [])
        if not group:
            found.append(group)
        group.append(task)
        if len(group) == GROUP:
            filling[task.training.world_size] = []
    return found


def train_group(group: Sequence[Task], *, folder: Path) -> int:
    curves = train_each([task.training for task in group], parameter_norms=True)
    for task, curve in zip(group, curves, strict=True):
        save_curve(curve, task.path(folder))
    return len(group)


def tasks(dtypes: Sequence[str], num_unseen: int) -> list[Task]:
    """All trainings: the baselines and their bands' control runs first, then mistakes and unseen
    runs by turns."""
    first: list[Task] = []
    wrong: list[Task] = []
    unseen: list[Task] = []
    for dtype in dtypes:
        spec = BASELINE[dtype]
        first.append(Task(dtype, "baseline", training_of(spec)))
        runs = control_trainings(spec, MOST_CONTROLS + num_unseen)
        for number, run in enumerate(runs, 1):
            kind, into = ("control", first) if number <= MOST_CONTROLS else ("unseen", unseen)
            into.append(Task(dtype, f"{kind} {number}", run))
        for order, (name, mistake) in enumerate(MISTAKES.items(), FIRST_WRONG):
            run = training_of(spec, (("debug.permute_rows", str(order)),), alter=mistake.alter)
            wrong.append(Task(dtype, name, replace(run, job=mistake.job(run.job))))
    wrong, unseen = (
        [task for turn in zip(*_by_dtype(each, dtypes), strict=True) for task in turn]
        for each in (wrong, unseen)
    )
    pairs = zip_longest(wrong, unseen)
    return [*first, *(task for pair in pairs for task in pair if task is not None)]


def _by_dtype(found: Sequence[Task], dtypes: Sequence[str]) -> list[list[Task]]:
    return [[task for task in found if task.dtype == dtype] for dtype in dtypes]


def save_curve(curve: Curve, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    loads = {f"load/{layer}": counts for layer, counts in curve.loads.items()}
    scalars = {f"scalar/{name}": values for name, values in curve.scalars.items()}
    np.savez_compressed(part, **scalars, **loads)  # type: ignore[arg-type]
    part.rename(path)


def read_curve(path: Path, name: str) -> Curve:
    with np.load(path) as arrays:
        found = {key: arrays[key] for key in arrays.files}
    scalars = {key[7:]: values for key, values in found.items() if key.startswith("scalar/")}
    loads = {key[5:]: values for key, values in found.items() if key.startswith("load/")}
    return Curve(name, range(1, 1 + len(scalars["loss"])), scalars, loads)


def judge(folder: Path, dtype: str, num_unseen: int) -> dict[str, Any]:
    """Bands of the first control runs, and what they make of everything else."""
    curves = {
        task.name: read_curve(task.path(folder), task.name)
        for task in tasks([dtype], num_unseen)
        if task.path(folder).exists()
    }
    controls = [curve for name, curve in curves.items() if name.startswith("control")]
    unseen = [curve for name, curve in curves.items() if name.startswith("unseen")]
    without = [q for q in quantities_of(controls[0]) if not q.startswith(NORM_OF)]
    bands = []
    for number in NUMBERS_OF_CONTROLS:
        for norms in (False, True):
            own = [curves["baseline"], *controls[:number]]
            band = Band(own, quantities=None if norms else without)
            judged = [band.check(curve) for curve in unseen]
            wrong = {
                name: band.check(curves[name]).as_json() for name in MISTAKES if name in curves
            }
            bands.append(
                {
                    "controls": number,
                    "norms": norms,
                    "bounds": band.bounds,
                    "limit": band.limit,
                    "own": band.statistics,
                    "unseen": [one.statistic for one in judged],
                    "alarms": [one.as_json() for one in judged if not one.inside],
                    "mistakes": wrong,
                }
            )
    seen = {bits(curve) for curve in [curves["baseline"], *controls]}
    new = {bits(curve) for curve in unseen} - seen
    early = early_looks([curves["baseline"], *controls, *unseen], without)
    return {
        "dtype": dtype,
        "unseen": len(unseen),
        "distinct": len(new),
        "bands": bands,
        "early": early,
    }


def early_looks(harmless: Sequence[Curve], quantities: Sequence[str]) -> list[dict[str, Any]]:
    """Harmless runs judged by few others, chosen at random: how many an early stop would fail."""
    chance, found = random.Random(0), []
    for number in EARLY_LOOKS:
        worst = []
        for _ in range(EARLY_DRAWS):
            drawn = chance.sample(harmless, len(harmless))
            band = Band(drawn[: number + 1], quantities=quantities)
            worst += [(one.statistic / one.limit) for one in map(band.check, drawn[number + 1 :])]
        found.append(
            {
                "controls": number,
                "judged": len(worst),
                "outside": sum(value > 1 for value in worst),
                "stopped": sum(value > CLEARLY for value in worst),
                "largest": max(worst),
            }
        )
    return found


def bits(curve: Curve) -> bytes:
    return b"".join(curve.scalars[q].tobytes() for q in ("loss", "grad_norm"))


def print_tables(found: Sequence[dict[str, Any]]) -> None:
    print(f"\nfalse alarms, stated rate {FALSE_ALARMS:g} for each run")
    row = "{:<10}{:>9}{:>7}{:>9}{:>8}{:>9}{:>9}  {}"
    print(
        row.format("dtype", "controls", "norms", "unseen", "alarms", "median", "largest", "bounds")
    )
    for one in found:
        for band in one["bands"]:
            bounds = ", ".join(f"{kind} {bound:.1f}" for kind, bound in band["bounds"].items())
            cells = [one["dtype"], band["controls"], "yes" if band["norms"] else "no"]
            cells += [len(band["unseen"]), len(band["alarms"])]
            cells += [f"{np.median(band['unseen']):.2f}", f"{max(band['unseen']):.2f}", bounds]
            print(row.format(*cells))
    for one in found:
        for look in one["early"]:
            print(
                "{dtype}: early look at {controls} control runs: of {judged} judgements {outside} "
                "outside, {stopped} clearly, largest {largest:.2f}".format(
                    dtype=one["dtype"], **look
                )
            )
    print(f"\nfirst step outside; {MOST_CONTROLS} control runs")
    for one in found:
        plain, norms = one["bands"][-2:]
        for name in plain["mistakes"]:
            words = [outside(band["mistakes"][name]) for band in (plain, norms)]
            print(f"{one['dtype']:<10}{name:<42}{words[0]:<46}with norms: {words[1]}")


def outside(judgement: dict[str, Any]) -> str:
    if judgement["inside"]:
        return f"inside ({judgement['statistic']:.2f})"
    return f"{judgement['first_outside']}, {judgement['quantity']} ({judgement['statistic']:.2f})"


def draw_false_alarms(found: Sequence[dict[str, Any]], png: Path) -> None:
    """Histograms of the unseen runs' statistics; everything is to lie below 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3 * len(found)), layout="constrained")
    axes_grid = figure.subplots(len(found), 2, squeeze=False, sharex=True)
    for one, row in zip(found, axes_grid, strict=True):
        for band, axes in zip(one["bands"][-2:], row, strict=True):
            edges = np.geomspace(0.02, 2, 60)
            axes.hist(np.clip(band["unseen"], 0.02, 2), edges, color="tab:blue", label="unseen")
            axes.plot(band["own"], np.full(len(band["own"]), -0.5), "|k", label="control runs")
            axes.axvline(band["limit"], color="tab:red", label="limit")
            norms = "with parameters' norms" if band["norms"] else "loss, gradient norm, loads"
            axes.set(xscale="log", ylabel="runs", xlabel="statistic")
            axes.set_title(f"{one['dtype']}, {norms}: {len(band['alarms'])} alarms", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
    axes_grid[0][0].legend(frameon=False, fontsize="small")
    figure.savefig(png, dpi=120)


def draw_detection(found: Sequence[dict[str, Any]], png: Path) -> None:
    """How far outside the mistakes are, and since which step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.35 * len(MISTAKES) + 1.6), layout="constrained")
    names = [
        name for name in MISTAKES if all(name in one["bands"][-1]["mistakes"] for one in found)
    ]
    for axes, one in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        styles = (("o", "tab:blue", "loss, gradient norm, loads"), ("D", "tab:orange", "norms too"))
        for band, (marker, color, label) in zip(one["bands"][-2:], styles, strict=True):
            judged = [band["mistakes"][name] for name in names]
            heights = np.arange(len(names)) + (0.15 if band["norms"] else -0.15)
            axes.plot([j["statistic"] for j in judged], heights, marker, color=color, label=label)
            for judgement, height in zip(judged, heights, strict=True):
                if not judgement["inside"]:
                    text, place = f"  step {judgement['first_outside']}", judgement["statistic"]
                    axes.text(place, height, text, fontsize=6, va="center", color=color)
        axes.axvline(1, color="tab:red")
        axes.set(xscale="log", title=one["dtype"], xlabel="statistic; outside is right of 1")
        axes.set_yticks(range(len(names)), names if one is found[0] else [])
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize="small", loc="center left")
    figure.savefig(png, dpi=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
