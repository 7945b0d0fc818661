"""A comparison of two runs on disk: one self-contained HTML page, a picture and the figures."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from titan_moe.verify.compare.comparison import Comparison, Verdict
from titan_moe.verify.compare.records import LOAD_OF, NORM_OF
from titan_moe.verify.compare.routing_diff import RoutingDiff
from titan_moe.verify.report.charts import (
    Chart,
    chart,
    draw_curves,
    draw_difference,
    draw_statistics,
    pair_lines,
)
from titan_moe.verify.report.data import (
    Deviation,
    common_steps,
    deviations,
    equal_steps,
    relative_difference,
)
from titan_moe.verify.report.heat import difference_of, heat_of, load_maps, share_map
from titan_moe.verify.report.png import comparison_png
from titan_moe.verify.report.render import Table, render
from titan_moe.verify.report.sections import configuration, environment, layouts, values_table
from titan_moe.verify.report.words import (
    ABSENT,
    all_notes,
    detail,
    labelled,
    layout_words,
    number,
    relative_words,
)

KINDS = {
    Verdict.IDENTICAL: "right",
    Verdict.INSIDE: "right",
    Verdict.DIFFERENT: "wrong",
    Verdict.UNJUDGED: "open",
}
_MAIN = ("loss", "grad_norm")
_MOST_ROWS, _MOST_FOLDED = 20, 1000
"""Rows that are seen, and that are seen on a click."""


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """report.html, report.png and comparison.json in a folder; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    html, png, figures = (
        folder / name for name in ("report.html", "report.png", "comparison.json")
    )
    html.write_text(comparison_page(comparison), encoding="utf-8")
    comparison_png(comparison, png)
    figures.write_text(json.dumps(comparison.as_json(), indent=1), encoding="utf-8")
    return [html, png, figures]


def comparison_page(comparison: Comparison) -> str:
    """Verdict, curves, expert load, routing, norms, layouts, configuration, environment, band."""
    comparison = labelled(comparison)
    pair = comparison.baseline, comparison.candidate
    verdict = comparison.verdict.value
    found = deviations(comparison)
    return render(
        "comparison.html",
        title=comparison.title,
        kind=KINDS[comparison.verdict],
        verdict=verdict[0].upper() + verdict[1:],
        details=[detail(comparison), *_replayed_words(comparison.replayed)],
        runs=_runs(comparison),
        caveats=comparison.caveats,
        missing=_missing(comparison),
        **_curves(comparison),
        values=_values(comparison),
        load=_load(comparison),
        routing=_routing(comparison),
        has_band=comparison.band is not None,
        quantities=_tables([one for one in found if not one.quantity.startswith(NORM_OF)]),
        norms=_tables([one for one in found if one.quantity.startswith(NORM_OF)]),
        layouts=layouts(pair),
        configuration=configuration(pair),
        environment=environment(pair),
        band=_band(comparison),
    )


def _runs(comparison: Comparison) -> str:
    runs = "; ".join(
        f"{run.name} ({layout_words(run)}, steps {run.curve.steps[0]} to {run.curve.steps[-1]})"
        for run in (comparison.baseline, comparison.candidate)
    )
    return f"Runs: {runs}."


def _missing(comparison: Comparison) -> list[str]:
    found = all_notes((comparison.baseline, comparison.candidate))
    if comparison.band_check is not None and (lacking := comparison.band_check.missing):
        few = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
        found.append(f"compared without {len(lacking)} quantities that the controls have: {few}")
    return found


def _replayed_words(replayed: Comparison | None) -> list[str]:
    if replayed is None:
        return []
    return [f"With the baseline's routing: {replayed.verdict.value}. {detail(replayed)}"]


def _curves(comparison: Comparison) -> dict[str, Any]:
    """Charts of both runs and of their difference; a line where there is no difference to draw."""
    charts, equal = [], []
    for quantity in _MAIN:
        charts.append(_overlay(comparison, quantity, f"{quantity}, both runs"))
        if steps := equal_steps(comparison, quantity):
            equal.append(f"{quantity}: the same bits in all {steps} steps.")
        else:
            charts.append(_difference(comparison, quantity, "difference on a log scale"))
    first, second = comparison.baseline.curve.scalars, comparison.candidate.curve.scalars
    others = [key for key in first if key not in _MAIN and not key.startswith((NORM_OF, "moe/"))]
    more = {key: _overlay(comparison, key, key) for key in others if key in second}
    return {"charts": charts, "equal": equal, "more": more}


def _overlay(comparison: Comparison, quantity: str, what: str) -> Chart:
    draw = partial(
        draw_curves,
        quantity=quantity,
        lines=pair_lines(comparison, quantity),
        band=comparison.band,
        first=comparison.first.step if comparison.first else None,
    )
    return chart(what, what, draw)


def _difference(comparison: Comparison, quantity: str, what: str) -> Chart:
    draw = partial(draw_difference, quantity=quantity, comparison=comparison)
    return chart(f"{quantity}, {what}", f"{quantity}, {what}", draw)


def _values(comparison: Comparison) -> tuple[Table, str]:
    first, second = comparison.baseline.curve, comparison.candidate.curve
    common = common_steps(first, second)
    heads = ["step"]
    columns = [[str(step) for step in common.steps]]
    for key in (k for k in _MAIN if k in first.scalars and k in second.scalars):
        ours, theirs = first.scalars[key][common.first], second.scalars[key][common.second]
        heads += [f"{key}, baseline", "candidate", "relative difference"]
        columns += [[number(v) for v in ours], [number(v) for v in theirs]]
        columns.append([relative_words(v) for v in relative_difference(ours, theirs)])
    return values_table(heads, columns)


def _load(comparison: Comparison) -> dict[str, Any]:
    heats = [heat_of(comparison.baseline), heat_of(comparison.candidate)]
    difference = difference_of(comparison.baseline, comparison.candidate)
    every = [*difference.busiest.values(), *difference.loads.values()]
    if every and all((values == 0).all() for values in every):
        found = load_maps(heats[:1])
        return found | {"lines": ["The same in all layers and steps.", *found["lines"]]}
    return load_maps(heats, difference)


def _routing(comparison: Comparison) -> dict[str, Any] | None:
    """Which expert choices differ; and what is left when the candidate routes as the baseline did,
    numeric drift alone."""
    diff, replayed = comparison.routing_diff, comparison.replayed
    if diff is None and replayed is None:
        return None
    found: dict[str, Any] = {"table": None, "replayed": None}
    if diff is not None:
        found |= _routing_table(diff)
    if replayed is not None:
        what = "difference with replayed routing"
        found |= {
            "replayed": _replayed_words(replayed)[0],
            "caveats": replayed.caveats,
            "charts": [
                _difference(replayed, quantity, what)
                for quantity in _MAIN
                if not equal_steps(replayed, quantity)
            ],
        }
    return found


def _routing_table(diff: RoutingDiff) -> dict[str, Any]:
    changed, slots = diff.changed_SL.sum(0), diff.slots_SL.sum(0)
    columns = {
        "layer": diff.layers,
        "changed": [f"{number:,}" for number in changed],
        "of chosen experts": [f"{number:,}" for number in slots],
        "share": [f"{share:.4%}" for share in changed / slots],
        "relative difference of the other weights": map(relative_words, diff.drift_SL.mean(0)),
    }
    heads, rows = list(columns), [list(row) for row in zip(*columns.values(), strict=True)]
    head = "share of chosen experts that differ, layer by layer"
    share_SL = np.asarray(diff.share_SL, dtype=float)
    return {
        "line": diff.line(),
        "grid": share_map(head, diff.layers, diff.steps, share_SL),
        "table": Table(heads, rows, numbers=range(1, len(heads))),
        "table_title": f"Changed choices by layer: {len(rows)}",
    }


def _tables(found: Sequence[Deviation]) -> dict[str, Any] | None:
    """Every quantity at its worst step, the worst first; many are folded."""
    if not found:
        return None
    heads = ["quantity", "step", "baseline", "candidate"]
    heads += ["relative difference", "reach", "steps out"]
    rows = [
        [
            one.quantity.removeprefix(NORM_OF),
            str(one.step),
            ABSENT if one.quantity.startswith(LOAD_OF) else number(one.baseline),
            ABSENT if one.quantity.startswith(LOAD_OF) else number(one.candidate),
            relative_words(one.relative),
            ABSENT if one.reach is None else f"{one.reach:.3g}",
            ABSENT if one.steps_outside is None else str(one.steps_outside),
        ]
        for one in found
    ]
    kinds = ["beyond" if (one.reach or 0) > 1 else "" for one in found]
    shown, below = slice(_MOST_ROWS), slice(_MOST_ROWS, _MOST_FOLDED)
    title = f"{len(rows) - _MOST_ROWS} more that differ less"
    title += f", the first {_MOST_FOLDED - _MOST_ROWS}" if len(rows) > _MOST_FOLDED else ""
    return {
        "shown": Table(heads, rows[shown], numbers=range(1, 7), kinds=kinds[shown]),
        "rest": Table(heads, rows[below], numbers=range(1, 7), kinds=kinds[below])
        if rows[below]
        else None,
        "rest_title": title,
    }


def _band(comparison: Comparison) -> dict[str, Any] | None:
    band = comparison.band
    if band is None:
        return None
    stated = band.as_json()["false_alarms"]
    draw = partial(draw_statistics, comparison=comparison)
    what = "statistics of the control runs and the candidate"
    return {
        "number": len(band.controls),
        "names": ", ".join(control.name for control in band.controls),
        "first": band.steps[0],
        "last": band.steps[-1],
        "quantities": len(band.quantities),
        "limit": f"{band.limit:.3g}",
        "if_log_normal": f"{100 * stated['if_log_normal']:.2g}",
        "at_most": f"{100 * stated['at_most']:.2g}",
        "charts": [] if comparison.band_check is None else [chart(what, what, draw, height=1.6)],
    }
