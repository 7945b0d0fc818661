"""How often the noise band is wrong: false alarms of harmless runs, and mistakes that it misses.

    python -m scripts.bench.noise_band                     # hours of one core
    python -m scripts.bench.noise_band --runs 40 --dtypes bfloat16

The baseline is that of `titan-moe verify losses --config configs/debug/compare.toml --baseline
ranks=1` on a machine without GPUs. Its control runs come from the same function: the first of them
make the bands; later ones, in orders that no band has seen, are judged by them. So are runs with a
mistake planted in them. The output folder gets every run's curve, and an interrupted script goes on
where it was; at the end results.json. With --judge, the runs that are there are judged and none is
trained.
"""

import argparse
import json
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
from titan_moe.verify.compare.noise.band import FALSE_ALARMS, Band, quantities_of
from titan_moe.verify.compare.records import NORM_OF, Curve
from titan_moe.verify.compare.run_spec import RunSpec

CONFIG = Path("configs/debug/compare.toml")
BASELINE = {
    "float32": RunSpec(config=CONFIG, ranks=1),
    "bfloat16": RunSpec(config=CONFIG, ranks=1, overrides=BFLOAT16),
}
MOST_CONTROLS = 24
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
    """Judges every curve by bands of the baseline and the first control runs."""
    curves = {
        task.name: read_curve(task.path(folder), task.name)
        for task in tasks([dtype], num_unseen)
        if task.path(folder).exists()
    }
    controls = [curve for name, curve in curves.items() if name.startswith("control")]
    unseen = [curve for name, curve in curves.items() if name.startswith("unseen")]
    without = [q for q in quantities_of(controls[0]) if not q.startswith(NORM_OF)]
    bands = []
    for norms in (False, True):
        band = Band([curves["baseline"], *controls], quantities=None if norms else without)
        judged = [band.check(curve) for curve in unseen]
        bands.append(
            {
                "norms": norms,
                "bounds": band.bounds,
                "unseen": [one.statistic for one in judged],
                "alarms": [one.as_json() for one in judged if not one.inside],
                "mistakes": {
                    name: band.check(curves[name]).as_json() for name in MISTAKES if name in curves
                },
            }
        )
    seen = {bits(curve) for curve in [curves["baseline"], *controls]}
    distinct = len({bits(curve) for curve in unseen} - seen)
    return {"dtype": dtype, "unseen": len(unseen), "distinct": distinct, "bands": bands}


def bits(curve: Curve) -> bytes:
    return b"".join(curve.scalars[q].tobytes() for q in ("loss", "grad_norm"))


def print_tables(judged: Sequence[dict[str, Any]]) -> None:
    print(f"\nfalse alarms, stated rate {FALSE_ALARMS:g} for each run")
    for one in judged:
        for band in one["bands"]:
            largest = max(band["unseen"], default=float("nan"))
            print(
                f"{one['dtype']}, {'with' if band['norms'] else 'without'} norms: "
                f"{len(band['alarms'])} of {len(band['unseen'])} unseen runs called different, "
                f"largest statistic {largest:.2f}"
            )
    print(f"\nfirst step outside; {MOST_CONTROLS} control runs")
    for one in judged:
        plain, norms = one["bands"]
        for name in plain["mistakes"]:
            words = [outside(band["mistakes"][name]) for band in (plain, norms)]
            print(f"{one['dtype']:<10}{name:<42}{words[0]:<46}with norms: {words[1]}")


def outside(judgement: dict[str, Any]) -> str:
    if judgement["inside"]:
        return f"inside ({judgement['statistic']:.2f})"
    return f"{judgement['first_outside']}, {judgement['quantity']} ({judgement['statistic']:.2f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
