"""One or several runs as one self-contained HTML page; nothing is compared."""

from collections.abc import Sequence

import numpy as np

from titan_moe.verify.compare.records import RunRecord
from titan_moe.verify.report.charts import Panel, charts, load_panels, run_panel
from titan_moe.verify.report.data import load_of
from titan_moe.verify.report.render import render
from titan_moe.verify.report.sections import (
    all_notes,
    configuration,
    environment,
    layout_words,
    layouts,
)

_FIRST = ("loss", "validation_loss", "grad_norm", "lr", "tokens_per_second")
_MOST_LOADS = 4
"""Runs whose expert load is drawn."""


def runs_page(title: str, runs: Sequence[RunRecord]) -> str:
    """Curves, expert load, layouts, configurations and environments of the runs."""
    panels = _panels(runs)
    more = {key: panel for key, panel in panels.items() if key not in _FIRST}
    loads = [load_of(run) for run in runs]
    return render(
        "runs.html",
        title=title,
        last=[_last(run) for run in runs],
        notes=all_notes(runs),
        charts=charts({key: panels[key] for key in _FIRST if key in panels}),
        more=more,
        more_charts=charts(more),
        events=[(run.name, event) for run in runs for event in run.events],
        load=charts(load_panels([load for load in loads if load.layers][:_MOST_LOADS])),
        layouts=layouts(runs),
        configuration=configuration(runs),
        environment=environment(runs),
    )


def _panels(runs: Sequence[RunRecord]) -> dict[str, Panel]:
    logged = dict.fromkeys(key for run in runs for key in run.curve.scalars)
    keys = [key for key in logged if not key.startswith("moe/")]
    return {key: run_panel(runs, key) for key in keys}


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
