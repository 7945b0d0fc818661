"""The pages of a comparison and of runs: self-contained HTML, and the figures of a comparison."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from titan_moe.verify.compare.comparison import Comparison
from titan_moe.verify.compare.outcome import Verdict
from titan_moe.verify.compare.pinned_routes import FLIP_HEADS, flip_rows
from titan_moe.verify.compare.records import COMPARED, RunRecord, compared
from titan_moe.verify.report.data import deviations, load_difference, load_of
from titan_moe.verify.report.plots import (
    Panel,
    charts,
    draw_curves,
    draw_difference,
    draw_flips,
    load_panels,
)
from titan_moe.verify.report.render import Table, render
from titan_moe.verify.report.sections import layout_words, shared_sections

_FIRST = ("loss", "validation_loss", "grad_norm", "lr", "tokens_per_second")
_MOST_LOADS = 4
"""Runs whose expert load is drawn."""


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes report.html and comparison.json into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    html, figures = folder / "report.html", folder / "comparison.json"
    html.write_text(comparison_page(comparison), encoding="utf-8")
    figures.write_text(json.dumps(comparison.as_json(), indent=1), encoding="utf-8")
    return [html, figures]


def comparison_page(comparison: Comparison) -> str:
    """Verdict, curves, expert load, norms, layouts, configuration, environment, noise band."""
    pair = [
        run if run.name == role else replace(run, name=f"{role} {run.name}")
        for role, run in (("baseline", comparison.baseline), ("candidate", comparison.candidate))
    ]
    flips, (first, second) = comparison.flips, (run.curve.scalars for run in pair)
    panels: dict[str, Panel] = {}
    more: dict[str, Panel] = {}
    for key in [key for key in first if key in second and not key.startswith("moe/")]:
        more[key] = partial(
            draw_curves, runs=pair, quantity=key, band=comparison.band, first=comparison.first
        )
    for key in [key for key in COMPARED if key in more]:
        panels[f"{key}, both runs"] = more.pop(key)
        if not np.array_equal(first[key], second[key], equal_nan=True):
            differ = partial(draw_difference, quantity=key, comparison=comparison)
            panels[f"{key}, difference on a log scale"] = differ
    runs = "; ".join(
        f"{run.name} ({layout_words(run)}, steps {run.curve.steps[0]} to {run.curve.steps[-1]})"
        for run in pair
    )
    return render(
        "comparison.html",
        title=comparison.title,
        comparison=comparison,
        color=_color,
        detail=_detail,
        runs=f"Runs: {runs}.",
        flips=Table(FLIP_HEADS, flip_rows(flips)) if flips else None,
        flip_charts=charts({"flips": partial(draw_flips, flips=flips)} if flips else {}),
        charts=charts(panels),
        more=charts(more),
        load=charts(load_panels([load_of(pair[1]), load_difference(*pair)])),
        quantities=deviations(comparison),
        **shared_sections(pair),
    )


def runs_page(title: str, runs: Sequence[RunRecord]) -> str:
    """Curves, expert load, layouts, configurations and environments of the runs; nothing is
    compared."""
    logged = dict.fromkeys(key for run in runs for key in run.curve.scalars)
    panels: dict[str, Panel] = {
        key: partial(draw_curves, runs=runs, quantity=key)
        for key in logged
        if not key.startswith("moe/")
    }
    main = {key: panels.pop(key) for key in _FIRST if key in panels}
    loads = [load_of(run) for run in runs]
    return render(
        "runs.html",
        title=title,
        last=[_last(run) for run in runs],
        charts=charts(main),
        more=charts(panels),
        events=[(run.name, event) for run in runs for event in run.events],
        load=charts(load_panels([load for load in loads if load.layers][:_MOST_LOADS])),
        **shared_sections(runs),
    )


def _color(verdict: Verdict) -> str:
    return {0: "good", 3: "good", 5: "warn"}.get(verdict.exit_code, "bad")


def _detail(comparison: Comparison) -> str:
    """The reasons of the verdict, as the command prints them; or what was compared."""
    words = [f"{line[0].upper()}{line[1:]}." for line in comparison.reasons()]
    if comparison.verdict is Verdict.IDENTICAL:
        first, second = comparison.baseline.curve, comparison.candidate.curve
        loads = sum(layer in second.loads for layer in first.loads)
        known = compared(first, second)
        known += [f"loads of {loads} layers"] if loads else []
        words.append(f"Compared in {len(first.steps)} steps: {', '.join(known)}.")
    return " ".join(words)


def _last(run: RunRecord) -> str:
    """The latest step and its metrics."""
    known = [f"step {run.curve.steps[-1]}"]
    for key in ("loss", "grad_norm", "validation_loss"):
        at = np.flatnonzero(np.isfinite(run.curve.scalars.get(key, [])))
        if len(at):
            value = f"{key.replace('_', ' ')} {run.curve.scalars[key][at[-1]]:.5g}"
            late = at[-1] == len(run.curve.steps) - 1
            known.append(value if late else f"{value} in step {run.curve.steps[at[-1]]}")
    return f"{run.name} ({layout_words(run)}): {', '.join(known)}"
