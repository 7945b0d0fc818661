"""How often the noise band is wrong: false alarms of harmless runs, and mistakes that it misses.

    python -m scripts.bench.noise_band                     # an hour of one core
    python -m scripts.bench.noise_band --runs 40 --dtypes bfloat16

A small DeepSeek-V3 is trained for 50 steps, again and again: harmless repeats that the band is
calibrated from, other harmless runs that it has never seen (rows in other orders, microbatches of
other sizes, layouts of two ranks), and runs with a mistake planted in them. No two share the seed
of their rows' order. The output folder gets every run's curve, and an interrupted script goes on
where it was; at the end results.json, false_alarms.png and detection.png.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.models.registry import model_config
from titan_moe.verify.compare.noise.band import FALSE_ALARMS, Band, quantities_of
from titan_moe.verify.compare.noise.mistakes import MISTAKES, Mistake, scale_an_expert
from titan_moe.verify.compare.noise.runs import DTYPES, Run, control_runs, train_each, with_dtype
from titan_moe.verify.compare.records import NORM_OF, Curve
from titan_moe.verify.gradients.fixture import at_depth
from titan_moe.verify.layouts.layouts import with_tables

CONFIG = at_depth(model_config("deepseek_v3", "gate"), 3)
STEPS = 50
SETTINGS: dict[str, dict[str, Any]] = {
    "training": {
        "steps": STEPS,
        "global_batch_size": 8,
        "local_batch_size": 8,
        "seq_len": 32,
        "max_norm": 1.0,
    },
    "optimizer": {"lr": 3e-3},
    "lr_scheduler": {"warmup_steps": 3},
}
NUMBERS_OF_REPEATS = (12, 24, 32)
MOST_REPEATS = NUMBERS_OF_REPEATS[-1]
GROUP = 4
FIRST_UNSEEN, FIRST_WRONG = 1001, 5001
"""Seeds of the first unseen harmless run's row order, and of the first wrong run's."""
LAYERS = ("layers.1", "layers.2", "mtp.layers.0")
HALVED = {
    f"gradient halved: {layer}, expert {expert}": Mistake(
        alter=partial(scale_an_expert, layer=layer, expert=expert, factor=0.5)
    )
    for layer in LAYERS
    for expert in range(8)
}


class Task(NamedTuple):
    """One training."""

    dtype: str
    name: str
    job: JobConfig
    run: Run

    def path(self, folder: Path) -> Path:
        safe = "".join(c if c.isalnum() else "_" for c in self.name)
        return folder / "curves" / self.dtype / f"{safe}.npz"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--runs", type=int, default=300, help="unseen harmless ones of each type")
    parser.add_argument("--out", type=Path, default=Path("outputs/noise_band"))
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time")
    options = parser.parse_args(argv)
    todo = [t for t in tasks(options.dtypes, options.runs) if not t.path(options.out).exists()]
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
        group = filling.setdefault(task.run.layout.world_size, [])
        if not group:
            found.append(group)
        group.append(task)
        if len(group) == GROUP:
            filling[task.run.layout.world_size] = []
    return found


def train_group(group: Sequence[Task], *, folder: Path) -> int:
    trainings = [(task.job, task.run) for task in group]
    curves = train_each(trainings, CONFIG, parameter_norms=True)
    for task, curve in zip(group, curves, strict=True):
        save_curve(curve, task.path(folder))
    return len(group)


def base_job(dtype: str) -> JobConfig:
    job = load_job(["--job.config_file", "configs/debug/gate_deepseek_v3.toml"])
    return with_dtype(with_tables(job, SETTINGS), dtype)


def tasks(dtypes: Sequence[str], num_unseen: int) -> list[Task]:
    """All trainings, the types by turns."""
    jobs = {dtype: base_job(dtype) for dtype in dtypes}
    found = []
    for dtype, job in jobs.items():
        for run in control_runs(job, CONFIG, MOST_REPEATS, most_ranks=2):
            found.append((run.order, Task(dtype, f"repeat {run.order}", job, run)))
        unseen = control_runs(job, CONFIG, 2 * num_unseen, first=FIRST_UNSEEN, most_ranks=2)
        # Two ranks cost several times as much: of those runs every second is left out.
        costly = [run for run in unseen if run.layout.world_size > 1][1::2]
        for run in [run for run in unseen if run not in costly][:num_unseen]:
            found.append((run.order, Task(dtype, f"unseen {run.order}", job, run)))
    wrong = list({**MISTAKES, **HALVED}.items())
    for dtype, job in jobs.items():
        for order, (name, mistake) in enumerate(wrong, FIRST_WRONG):
            run = Run(order=order, alter=mistake.alter)
            # Those of the list after the repeats, the others last.
            place = MOST_REPEATS if name in MISTAKES else order
            found.append((place, Task(dtype, name, mistake.job(job), run)))
    return [task for _, task in sorted(found, key=lambda pair: pair[0])]


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
    return Curve(name, range(1, STEPS + 1), scalars, loads)


def judge(folder: Path, dtype: str, num_unseen: int) -> dict[str, Any]:
    """Bands from the first repeats, and what they make of everything else."""
    curves = {
        task.name: read_curve(task.path(folder), task.name) for task in tasks([dtype], num_unseen)
    }
    repeats = [curve for name, curve in curves.items() if name.startswith("repeat")]
    unseen = [curve for name, curve in curves.items() if name.startswith("unseen")]
    without = [q for q in quantities_of(repeats[0]) if not q.startswith(NORM_OF)]
    bands = []
    for number in NUMBERS_OF_REPEATS:
        for norms in (False, True):
            band = Band(repeats[:number], quantities=None if norms else without)
            judged = [band.check(curve) for curve in unseen]
            wrong = {name: band.check(curves[name]).as_json() for name in (*MISTAKES, *HALVED)}
            bands.append(
                {
                    "repeats": number,
                    "norms": norms,
                    "bounds": band.bounds,
                    "limit": band.limit,
                    "own": band.statistics,
                    "unseen": [one.statistic for one in judged],
                    "alarms": [one.as_json() for one in judged if not one.inside],
                    "mistakes": wrong,
                }
            )
    seen = {bits(curve) for curve in repeats}
    new = {bits(curve) for curve in unseen} - seen
    return {"dtype": dtype, "unseen": len(unseen), "distinct": len(new), "bands": bands}


def bits(curve: Curve) -> bytes:
    return b"".join(curve.scalars[q].tobytes() for q in ("loss", "grad_norm"))


def print_tables(found: Sequence[dict[str, Any]]) -> None:
    print(f"\nfalse alarms, stated rate {FALSE_ALARMS:g} for each run")
    row = "{:<10}{:>8}{:>7}{:>9}{:>8}{:>9}{:>9}  {}"
    print(
        row.format("dtype", "repeats", "norms", "unseen", "alarms", "median", "largest", "bounds")
    )
    for one in found:
        for band in one["bands"]:
            bounds = ", ".join(f"{kind} {bound:.1f}" for kind, bound in band["bounds"].items())
            cells = [one["dtype"], band["repeats"], "yes" if band["norms"] else "no"]
            cells += [len(band["unseen"]), len(band["alarms"])]
            cells += [f"{np.median(band['unseen']):.2f}", f"{max(band['unseen']):.2f}", bounds]
            print(row.format(*cells))
    print(f"\nfirst step outside, of {STEPS}; {MOST_REPEATS} repeats")
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
            axes.plot(band["own"], np.full(len(band["own"]), -0.5), "|k", label="repeats")
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
    names = list(MISTAKES)
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
