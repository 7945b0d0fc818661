"""A comparison of two runs on disk: one self-contained HTML page and the figures."""

import json
from functools import partial
from pathlib import Path

from titan_moe.verify.compare.comparison import Comparison
from titan_moe.verify.compare.outcome import Verdict
from titan_moe.verify.compare.pinned_routes import FLIP_HEADS, flip_rows
from titan_moe.verify.report.charts import (
    Panel,
    charts,
    draw_difference,
    draw_flips,
    load_panels,
    run_panel,
)
from titan_moe.verify.report.data import deviations, equal_steps, load_difference, load_of
from titan_moe.verify.report.render import Table, render
from titan_moe.verify.report.sections import (
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
    Verdict.TOO_SLOW: "bad",
    Verdict.TOO_LARGE: "bad",
    Verdict.COST_UNJUDGED: "warn",
}
_MAIN = ("loss", "grad_norm")


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
    verdict = comparison.words
    free, flips = comparison.free, comparison.flips
    first, second = comparison.baseline.curve.scalars, comparison.candidate.curve.scalars
    others = [key for key in first if key not in _MAIN and not key.startswith("moe/")]
    more = {key: _pair_panel(comparison, key) for key in others if key in second}
    runs = "; ".join(
        f"{run.name} ({layout_words(run)}, steps {run.curve.steps[0]} to {run.curve.steps[-1]})"
        for run in pair
    )
    return render(
        "comparison.html",
        title=comparison.title,
        color=_COLORS[comparison.outcome],
        verdict=verdict[0].upper() + verdict[1:],
        detail=detail(comparison),
        runs=f"Runs: {runs}.",
        free=free,
        free_color=_COLORS[free.verdict] if free else "",
        free_detail=detail(free) if free else "",
        flips=Table(FLIP_HEADS, flip_rows(flips)) if flips else None,
        flip_charts=charts({"flips": partial(draw_flips, flips=flips)} if flips else {}),
        caveats=comparison.caveats,
        missing=all_notes(pair),
        charts=charts(_curve_panels(comparison)),
        more=more,
        more_charts=charts(more),
        load=charts(_load_panels(comparison)),
        costs=comparison.costs,
        quantities=deviations(comparison),
        layouts=layouts(pair),
        configuration=configuration(pair),
        environment=environment(pair),
        band=comparison.band,
    )


def _curve_panels(comparison: Comparison) -> dict[str, Panel]:
    """Both runs' curves and their difference, which equal bits do not have."""
    panels: dict[str, Panel] = {}
    for quantity in _MAIN:
        panels[f"{quantity}, both runs"] = _pair_panel(comparison, quantity)
        draw = partial(draw_difference, quantity=quantity, comparison=comparison)
        panels[f"{quantity}, difference on a log scale"] = draw
    equal = all(equal_steps(comparison, quantity) for quantity in _MAIN)
    return {name: panel for name, panel in panels.items() if not equal or "both" in name}


def _pair_panel(comparison: Comparison, quantity: str) -> Panel:
    pair = comparison.baseline, comparison.candidate
    return run_panel(pair, quantity, band=comparison.band, first=comparison.first)


def _load_panels(comparison: Comparison) -> dict[str, Panel]:
    """The candidate's load, and its difference from the baseline's."""
    pair = comparison.baseline, comparison.candidate
    return load_panels([load_of(comparison.candidate), load_difference(*pair)])
