"""Train with mistakes that other projects had, beside the right program, for docs/museum.md.

    python -m scripts.museum outputs/museum               # everything, then the page
    python -m scripts.museum outputs/museum --minutes 4   # begin nothing after four minutes

The mistakes are those of tests/support/planted_bugs.toml with `museum`, each in the layout of its
`caught_on`. The model is deepseek_v3's of configs/debug/compare.toml with fewer layers. Two noise
bands stand beside a curve. "seeds": right runs from other weights and data, which is what an eye
has to compare with. "orders": the same training with sums in another order and in other layouts, as
`verify losses` makes it. The gate and the localizer judge in float64. What the folder has is not
computed again.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pytest

from scripts.bench.measure import options
from scripts.docs.__main__ import main as write_docs
from scripts.museum.page import FIGURES, RESULTS, STEPS, exhibits, picture
from tests.support.catching import found_by_localizer, judge
from tests.support.gates import KINDS, gate_of
from tests.support.paths import DEBUG_CONFIGS, REPO
from tests.support.planting import Bug
from tests.support.trainings import train_curve
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.files import write_whole
from titan_moe.verify.compare.control_runs import control_specs
from titan_moe.verify.compare.noise.band import Band
from titan_moe.verify.compare.records import COMPARED, RunRecord, read_run
from titan_moe.verify.compare.run_spec import RunSpec, Words, words_of
from titan_moe.verify.layouts.layouts import parse

_LAYERS, _SEEDS, _ORDERS, _LAST = 3, 8, 6, 10
_KEYS = words_of("training", steps=STEPS, local_batch_size=8) + words_of("debug", seed=1)
_MICROBATCHES = words_of("training", local_batch_size=4)


class Run(NamedTuple):
    """A training that is made once."""

    spec: RunSpec
    words: Words = ()
    bug: Bug | None = None

    def record(self, folder: Path) -> RunRecord:
        log = folder / "metrics.jsonl"
        if not log.exists() or len(read_json_lines(log)) < STEPS:
            train_curve(self.spec, folder, self.words, bug=self.bug, num_layers=_LAYERS)
        return read_run(folder)


def key(name: str, bug: Bug) -> str:
    """Returns a name for files that changes with the mistake and its layout."""
    return f"{name} {crc32(repr(bug[:4]).encode()):08x}"


def all_runs(bugs: Mapping[str, Bug]) -> dict[str, Run]:
    """Returns the right trainings of each kind, and those with mistakes, by folder."""
    runs, specs = {}, {}
    for kind in sorted({bug.kind for bug in bugs.values()}):
        words = sum((words_of(table, **keys) for table, keys in KINDS[kind].items()), _KEYS)
        spec = RunSpec(config=DEBUG_CONFIGS / "compare.toml", ranks=1, overrides=words)
        seeds = [Run(spec, words_of("debug", seed=n + 2)) for n in range(_SEEDS)]
        orders = [Run(*control) for control in control_specs(spec, _ORDERS, num_gpus=0)]
        runs |= {f"{kind} right": Run(spec)} | {f"{kind} seeds {n}": r for n, r in enumerate(seeds)}
        runs |= {f"{kind} orders {n}": run for n, run in enumerate(orders)}
        specs[kind] = spec
    for name, bug in bugs.items():
        laid_out = specs[bug.kind].with_layout(parse(bug.caught_on))
        runs[key(name, bug)] = Run(laid_out, _MICROBATCHES, bug)
    return runs


def verdict(name: str, bug: Bug, out: Path) -> dict[str, Any]:
    """Returns the gate's first line and the localizer's place, computed once."""
    file = out / f"{key(name, bug)}.json"
    if not file.exists():
        gate = gate_of(bug.family, out / "gate", bug.kind)
        with pytest.MonkeyPatch.context() as patch:
            result, _ = judge(gate, bug, bug.caught_on, patch)
        finding = found_by_localizer(gate, bug, out / "captures" / name)
        said = {"gate": result.lines[:1], "localizer": finding and finding.first.place}
        write_whole(file, json.dumps(said))
    return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def bands_of(kind: str, records: Mapping[str, RunRecord], varied: str) -> dict[str, Band]:
    """Returns the noise band of each quantity of a kind's right trainings."""
    names = (f"{kind} right", f"{kind} {varied}")
    curves = [record for name, record in records.items() if name.startswith(names)]
    return {quantity: Band(curves, [quantity]) for quantity in COMPARED}


def main() -> int:
    parser = options(__doc__, repeats=None)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing later")
    arguments = parser.parse_args()
    out, end = arguments.out.absolute(), time.monotonic() + 60 * arguments.minutes
    bugs = exhibits()
    runs = all_runs(bugs)
    work = [partial(run.record, out / name) for name, run in runs.items()]
    for number, make in enumerate([*work, *(partial(verdict, n, b, out) for n, b in bugs.items())]):
        if time.monotonic() > end:
            print(f"{number} of {len(work) + len(bugs)} are done: run it again")
            return 1
        make()
    records = {name: run.record(out / name) for name, run in runs.items()}
    kinds, varied = {bug.kind for bug in bugs.values()}, ("seeds", "orders")
    bands = {(kind, how): bands_of(kind, records, how) for kind in kinds for how in varied}
    found = {name: verdict(name, bug, out) for name, bug in bugs.items()}
    for name, bug in bugs.items():
        curve, right = records[key(name, bug)], records[f"{bug.kind} right"]
        loss, norm = (curve.scalars[each] / right.scalars[each] for each in COMPARED)
        found[name] |= {"loss": np.mean(loss[-_LAST:]) - 1, "norm": np.median(norm)}
        for how in varied:
            firsts = [band.check(curve).first for band in bands[bug.kind, how].values()]
            found[name][how] = [first and first.step for first in firsts]
    about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "bugs": found}
    write_whole(RESULTS, json.dumps(about, indent=1) + "\n")
    for hall, figure in FIGURES.items():
        shown = {name: bug for name, bug in bugs.items() if bug.hall == hall}
        names = {f"{bug.kind} right": f"{bug.kind} right" for bug in shown.values()}
        names |= {key(*each): each[0] for each in shown.items()}
        curves = [replace(records[folder], name=name) for folder, name in names.items()]
        write_whole(REPO / "docs" / figure, picture(hall, curves, bands["AdamW", "seeds"]))
    return write_docs([])


if __name__ == "__main__":
    sys.exit(main())
