"""A comparison of two runs on disk: one self-contained HTML page and the figures."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from titan_moe.verify.compare.comparison import Comparison, Verdict
from titan_moe.verify.compare.records import LOAD_OF, NORM_OF
from titan_moe.verify.report.charts import (
    Panel,
    charts,
    draw_difference,
    draw_statistics,
    load_panels,
    pair_panel,
)
from titan_moe.verify.report.data import (
    Deviation,
    deviations,
    equal_steps,
    load_difference,
    load_of,
)
from titan_moe.verify.report.render import Table, render
from titan_moe.verify.report.sections import (
    ABSENT,
    all_notes,
    configuration,
    detail,
    environment,
    labelled,
    layout_words,
    layouts,
)

_COLORS = {
    Verdict.IDENTICAL: "good",
    Verdict.INSIDE: "good",
    Verdict.DIFFERENT: "bad",
    Verdict.UNJUDGED: "warn",
}
_MAIN = ("loss", "grad_norm")
_MOST_ROWS, _MOST_FOLDED = 20, 1000
"""Rows that are seen, and that are seen on a click."""


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes report.html and comparison.json into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    html, figures = folder / "report.html", folder / "comparison.json"
    html.write_text(comparison_page(comparison), encoding="utf-8")
    figures.write_text(json.dumps(comparison.as_json(), indent=1), encoding="utf-8")
    return [html, figures]


def comparison_page(comparison: Comparison) -> str:
    """Verdict, curves, expert load, norms, layouts, configuration, environment, noise band."""
    comparison = labelled(comparison)
    pair = comparison.baseline, comparison.candidate
    verdict = comparison.verdict.value
    found = deviations(comparison)
    first, second = comparison.baseline.curve.scalars, comparison.candidate.curve.scalars
    others = [key for key in first if key not in _MAIN and not key.startswith((NORM_OF, "moe/"))]
    more = {key: pair_panel(comparison, key) for key in others if key in second}
    runs = "; ".join(
        f"{run.name} ({layout_words(run)}, steps {run.curve.steps[0]} to {run.curve.steps[-1]})"
        for run in pair
    )
    return render(
        "comparison.html",
        title=comparison.title,
        color=_COLORS[comparison.verdict],
        verdict=verdict[0].upper() + verdict[1:],
        detail=detail(comparison),
        runs=f"Runs: {runs}.",
        caveats=comparison.caveats,
        missing=_missing(comparison),
        charts=charts(_curve_panels(comparison)),
        more=more,
        more_charts=charts(more),
        load=charts(_load_panels(comparison)),
        has_band=comparison.band is not None,
        quantities=_tables([one for one in found if not one.quantity.startswith(NORM_OF)]),
        norms=_tables([one for one in found if one.quantity.startswith(NORM_OF)]),
        layouts=layouts(pair),
        configuration=configuration(pair),
        environment=environment(pair),
        band=_band(comparison),
    )


def _curve_panels(comparison: Comparison) -> dict[str, Panel]:
    """Both runs' curves and their difference, which equal bits do not have."""
    panels: dict[str, Panel] = {}
    for quantity in _MAIN:
        panels[f"{quantity}, both runs"] = pair_panel(comparison, quantity)
        draw = partial(draw_difference, quantity=quantity, comparison=comparison)
        panels[f"{quantity}, difference on a log scale"] = draw
    equal = all(equal_steps(comparison, quantity) for quantity in _MAIN)
    return {name: panel for name, panel in panels.items() if not equal or "both" in name}


def _load_panels(comparison: Comparison) -> dict[str, Panel]:
    """The candidate's load, and its difference from the baseline's."""
    pair = comparison.baseline, comparison.candidate
    return load_panels([load_of(comparison.candidate), load_difference(*pair)])


def _missing(comparison: Comparison) -> list[str]:
    found = all_notes((comparison.baseline, comparison.candidate))
    if comparison.band_check is not None and (lacking := comparison.band_check.missing):
        few = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
        found.append(f"compared without {len(lacking)} quantities that the controls have: {few}")
    return found


def _tables(found: Sequence[Deviation]) -> list[Table]:
    """Every quantity at its worst step, the worst first: the rows that are seen, and the rest."""
    heads = ["quantity", "step", "baseline", "candidate"]
    heads += ["relative difference", "reach", "steps out"]
    rows, kinds = [], []
    for one in found:
        is_load = one.quantity.startswith(LOAD_OF)
        numbers = [ABSENT if is_load else f"{v:.8g}" for v in (one.baseline, one.candidate)]
        relative = "0" if one.relative == 0 else f"{one.relative:.2e}"
        reach = [ABSENT, ABSENT]
        if one.reach is not None:
            reach = [f"{one.reach:.3g}", str(one.steps_outside)]
        quantity = one.quantity.removeprefix(NORM_OF)
        rows.append([quantity, str(one.step), *numbers, relative, *reach])
        kinds.append("beyond" if (one.reach or 0) > 1 else "")
    shown = slice(_MOST_ROWS), slice(_MOST_ROWS, _MOST_FOLDED)
    return [
        Table(heads, rows[part], numbers=range(1, 7), kinds=kinds[part])
        for part in shown
        if rows[part]
    ]


def _band(comparison: Comparison) -> dict[str, Any] | None:
    band = comparison.band
    if band is None:
        return None
    stated = band.as_json()["false_alarms"]
    panels: dict[str, Panel] = {}
    if comparison.band_check is not None:
        panels["statistics of all curves"] = partial(draw_statistics, comparison=comparison)
    return {
        "number": len(band.controls),
        "names": ", ".join(control.name for control in band.controls),
        "first": band.steps[0],
        "last": band.steps[-1],
        "quantities": len(band.quantities),
        "limit": f"{band.limit:.3g}",
        "if_log_normal": f"{100 * stated['if_log_normal']:.2g}",
        "at_most": f"{100 * stated['at_most']:.2g}",
        "charts": charts(panels, height=1.9),
    }
