"""Train with mistakes that other projects had, beside the right program, for docs/museum.md.

    python -m scripts.museum outputs/museum               # everything, then the page
    python -m scripts.museum outputs/museum --minutes 4   # begin nothing after four minutes

The mistakes are those of tests/support/planted_bugs.toml with `museum`, each in the layout of its
`caught_on`. The model is deepseek_v3's of configs/debug/compare.toml with fewer layers. Two bands
stand beside a curve. "seeds": what right runs from other weights and data do, which is all that an
eye can compare with. "orders": the noise band of `verify losses`, whose right runs have their sums
in another order or another layout. The gate and the localizer judge in float64. What the folder has
is not computed again.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from scripts.docs.__main__ import main as write_docs
from scripts.museum.page import FIGURES, RESULTS, picture
from tests.support.catching import gate_and_localizer
from tests.support.exhibits import SEEDS, all_runs, exhibits, key
from tests.support.paths import REPO
from tests.support.planting import Bug
from titan_moe.runtime.files import write_whole
from titan_moe.verify.compare.noise.band import Band
from titan_moe.verify.compare.records import COMPARED, RunRecord

_LAST = 10


def verdict(name: str, bug: Bug, out: Path) -> dict[str, Any]:
    """Returns the gate's first line and the localizer's place, computed once."""
    file = out / f"{key(name, bug)}.json"
    if not file.exists():
        result, finding = gate_and_localizer(bug, out / "verdicts")
        said = {"gate": result.lines[:1], "localizer": finding and finding.first.place}
        write_whole(file, json.dumps(said))
    return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def seeds_of(curves: list[RunRecord]) -> Any:
    """Returns three standard deviations around the mean of right runs, as a band to be drawn."""
    edges = {}
    for quantity in COMPARED:
        values_NS = np.stack([smooth(curve).scalars[quantity] for curve in curves])
        middle_S, reach_S = values_NS.mean(0), 3 * values_NS.std(0, ddof=1)
        edges[quantity] = middle_S - reach_S, middle_S + reach_S
    return SimpleNamespace(steps=curves[0].steps, quantities=COMPARED, edges=edges.get)


def first_seen(curve: RunRecord, seeds: Any, quantity: str) -> int | None:
    """Returns the first step at which an eye can see a difference."""
    low_S, high_S = seeds.edges(quantity)
    values_S = smooth(curve).scalars[quantity]
    outside_S = (values_S < low_S) | (values_S > high_S)
    return curve.steps[int(outside_S.argmax())] if outside_S.any() else None


def smooth(curve: RunRecord) -> RunRecord:
    """Returns a curve of medians over the last ten steps: one step's spike does not show."""
    ends = range(1, len(curve.steps) + 1)
    scalars = {
        quantity: np.array(
            [np.median(curve.scalars[quantity][max(0, n - _LAST) : n]) for n in ends]
        )
        for quantity in COMPARED
    }
    return replace(curve, scalars=scalars)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.museum", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing later")
    arguments = parser.parse_args()
    out, end = arguments.out.absolute(), time.monotonic() + 60 * arguments.minutes
    bugs = exhibits()
    runs = all_runs(bugs)
    work: list[Callable[[], Any]] = [partial(runs[name].record, out / name) for name in runs]
    work += [partial(verdict, *each, out) for each in bugs.items()]
    for make in work:
        if time.monotonic() > end:
            print("not done: run it again")
            return 1
        make()
    records = {name: run.record(out / name) for name, run in runs.items()}
    found, seeds = {}, {}
    for kind in {bug.kind for bug in bugs.values()}:
        right, *controls = [record for n, record in records.items() if n.startswith(f"{kind} ")]
        seeds[kind] = seeds_of([right, *controls[:SEEDS]])
        orders = [Band([right, *controls[SEEDS:]], [quantity]) for quantity in COMPARED]
        for name, bug in [each for each in bugs.items() if each[1].kind == kind]:
            curve = records[key(name, bug)]
            loss, norm = (curve.scalars[each] / right.scalars[each] for each in COMPARED)
            firsts = [band.check(curve).first for band in orders]
            found[name] = verdict(name, bug, out) | {
                "loss": np.mean(loss[-_LAST:]) - 1,
                "norm": np.median(norm),
                "seeds": [first_seen(curve, seeds[kind], quantity) for quantity in COMPARED],
                "orders": [first and first.step for first in firsts],
            }
    about = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "bugs": found}
    write_whole(RESULTS, json.dumps(about, indent=1) + "\n")
    for hall, figure in FIGURES.items():
        shown = {name: bug for name, bug in bugs.items() if bug.hall == hall}
        names = {f"{bug.kind} right": f"{bug.kind} right" for bug in shown.values()}
        names |= {key(*each): each[0] for each in shown.items()}
        curves = [smooth(replace(records[folder], name=name)) for folder, name in names.items()]
        write_whole(REPO / "docs" / figure, picture(hall, curves, seeds["AdamW"]))
    return write_docs([])


if __name__ == "__main__":
    sys.exit(main())
