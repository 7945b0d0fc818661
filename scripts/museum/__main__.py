"""Train with mistakes that other projects had, beside the right program, for docs/museum.md.

    python -m scripts.museum outputs/museum               # everything, then the page
    python -m scripts.museum outputs/museum --minutes 4   # go on for four minutes

The mistakes are those of tests/support/planted_bugs.toml with `museum`, each in the layout of its
`caught_on`. The model is deepseek_v3's of configs/debug/compare.toml with fewer layers. Two noise
bands stand beside a mistake's curve. "seeds": right runs from other seeds, thus of other weights
and data, which is what an eye has to compare with. "orders": the same training with sums in another
order and in other layouts, as `verify losses` makes it. A gate and a localizer see the mistake in
float64. What has been computed stays in the folder, and is not computed again.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.docs.__main__ import main as write_docs
from scripts.museum.page import FIGURES, RESULTS, STEPS, exhibits, picture_of
from tests.support.catching import captured, judge, setting
from tests.support.gates import KINDS, gate_of
from tests.support.paths import DEBUG_CONFIGS, REPO
from tests.support.planting import Bug, plant
from tests.support.trainings import process_here
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job, resolve
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.files import write_whole
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training.trainer import Trainer
from titan_moe.verify.compare.control_runs import batch_words, control_specs
from titan_moe.verify.compare.noise.band import Band
from titan_moe.verify.compare.records import COMPARED, RunRecord, read_run
from titan_moe.verify.compare.run_spec import RunSpec, Words, words_of
from titan_moe.verify.layouts.layouts import parse
from titan_moe.verify.localize.localize import locate

_LAYERS, _CONTROLS, _LAST = 3, 6, 10
_KEYS = words_of("training", steps=STEPS, local_batch_size=4) + words_of("debug", seed=1)


def train(job: JobConfig, bug: Bug | None) -> None:
    """Trains on this rank, with a mistake or without."""
    if bug is not None:
        plant(bug)
    config = replace(model_of_job(job.model), num_layers=_LAYERS)
    Trainer(job, config, process_here()).train()


class Museum:
    """Everything that is computed lies in one folder, by name."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def right(self, kind: str) -> RunSpec:
        tables = {table: words_of(table, **keys) for table, keys in KINDS[kind].items()}
        words = sum(tables.values(), _KEYS)
        return RunSpec(config=DEBUG_CONFIGS / "compare.toml", ranks=1, overrides=words)

    def controls(self, kind: str) -> dict[str, tuple[RunSpec, Words]]:
        """Returns right runs by name: the baseline first, other seeds, other orders."""
        spec = self.right(kind)
        seeds = [(spec, (("debug.seed", str(seed)),)) for seed in range(2, _CONTROLS + 2)]
        orders = control_specs(spec, _CONTROLS, num_gpus=0)
        runs = {"right": (spec, ())} | {f"seeds {n}": run for n, run in enumerate(seeds)}
        return runs | {f"orders {n}": run for n, run in enumerate(orders)}

    def run(self, name: str, spec: RunSpec, words: Words = (), bug: Bug | None = None) -> RunRecord:
        folder = self.out / name
        log = folder / "metrics.jsonl"
        if not log.exists() or len(read_json_lines(log)) < STEPS:
            shutil.rmtree(folder, ignore_errors=True)
            keys = dict((*batch_words(spec, spec.job()), *words))
            keys["job.dump_folder"] = str(folder)
            job = load_job([*spec.file(), *spec.arguments(*keys.items())])
            run_on_ranks(train, spec.world_size, resolve(job, spec.world_size), bug)
        return read_run(folder)

    def control(self, kind: str, name: str) -> RunRecord:
        return self.run(f"{kind}/{name}", *self.controls(kind)[name])

    def trained(self, name: str, bug: Bug) -> RunRecord:
        spec = self.right(bug.kind).with_layout(parse(bug.caught_on))
        return self.run(f"bugs/{name}", spec, bug=bug)

    def bands(self, kind: str) -> dict[str, dict[str, Band]]:
        """Returns the noise bands of each quantity: of other seeds, and of other orders."""
        runs = {name: self.control(kind, name) for name in self.controls(kind)}
        found: dict[str, dict[str, Band]] = {}
        for controls in ("seeds", "orders"):
            curves = [run for name, run in runs.items() if name.split()[0] in ("right", controls)]
            found[controls] = {quantity: Band(curves, [quantity]) for quantity in COMPARED}
        return found

    def verdict(self, name: str, bug: Bug) -> dict[str, Any]:
        """Returns what the gate's first line and the localizer say of a mistake."""
        file = self.out / "verdicts" / f"{name}.json"
        if not file.exists():
            folder = self.out / "gates" / name
            gate = gate_of(bug.family, folder, bug.kind)
            with pytest.MonkeyPatch.context() as patch:
                result, _ = judge(gate, bug, bug.caught_on, patch)
            tasks = [setting(gate, text, bug.caught_on) for text in ("dp_shard=1", bug.caught_on)]
            plain = captured(tasks[0], folder / "plain")
            finding = locate(plain, captured(tasks[1], folder / "bug", bug))
            place = finding and [*finding.first.place]
            said = {"gate": [line.split(": ", 2)[2] for line in result.lines], "localizer": place}
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(said))
        return json.loads(file.read_text())

    def result(self, name: str, bug: Bug, bands: dict[str, dict[str, Band]]) -> dict[str, Any]:
        """Returns the figures of one mistake beside the bands of its kind."""
        curve, right = self.trained(name, bug), self.control(bug.kind, "right")
        ratios = {q: curve.scalars[q] / right.scalars[q] for q in COMPARED}
        found: dict[str, Any] = self.verdict(name, bug)
        found["loss"] = float(np.mean(ratios["loss"][-_LAST:])) - 1
        found["norm"] = float(np.median(ratios["grad_norm"]))
        for controls, of in bands.items():
            firsts = [of[quantity].check(curve).first for quantity in COMPARED]
            found[controls] = [first and first.step for first in firsts]
        return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.museum", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing later")
    options = parser.parse_args()
    museum, end = Museum(options.out.absolute()), time.monotonic() + 60 * options.minutes
    bugs = exhibits()
    kinds = sorted({bug.kind for bug in bugs.values()})
    work: list[Callable[[], Any]] = [
        partial(museum.control, kind, name) for kind in kinds for name in museum.controls(kind)
    ]
    for each in bugs.items():
        work += [partial(museum.trained, *each), partial(museum.verdict, *each)]
    for number, make in enumerate(work):
        if time.monotonic() > end:
            print(f"{number} of {len(work)} are done: run it again")
            return 1
        make()
    bands = {kind: museum.bands(kind) for kind in kinds}
    results = {name: museum.result(name, bug, bands[bug.kind]) for name, bug in bugs.items()}
    about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "bugs": results}
    write_whole(RESULTS, json.dumps(about, indent=1) + "\n")
    for hall in dict.fromkeys(bug.hall for bug in bugs.values()):
        shown = {name: bug for name, bug in bugs.items() if bug.hall == hall}
        runs = [replace(museum.trained(*each), name=each[0]) for each in shown.items()]
        rights = [
            replace(museum.control(kind, "right"), name=f"right, {kind}")
            for kind in dict.fromkeys(["AdamW", *(bug.kind for bug in shown.values())])
        ]
        picture = picture_of(hall, [*rights, *runs], bands["AdamW"]["seeds"])
        write_whole(REPO / "docs" / FIGURES[hall], picture)
    return write_docs([])


if __name__ == "__main__":
    sys.exit(main())
