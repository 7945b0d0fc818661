"""One or several runs as one self-contained HTML page; nothing is compared."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from titan_moe.verify.compare.records import NORM_OF, RunRecord
from titan_moe.verify.report.charts import Chart, chart, draw_curves, run_lines
from titan_moe.verify.report.heat import heat_of, load_maps
from titan_moe.verify.report.render import Table, render
from titan_moe.verify.report.sections import (
    configuration,
    environment,
    events,
    layouts,
    values_table,
)
from titan_moe.verify.report.words import ABSENT, all_notes, layout_words

_FIRST = ("loss", "validation_loss", "grad_norm", "lr", "tokens_per_second")


def runs_page(title: str, runs: Sequence[RunRecord]) -> str:
    """Curves, expert load, layouts, configurations and environments of the runs."""
    logged = list(dict.fromkeys(key for run in runs for key in run.curve.scalars))
    logged = [key for key in logged if not key.startswith((NORM_OF, "moe/"))]
    return render(
        "runs.html",
        title=title,
        last=[_last(run) for run in runs],
        notes=all_notes(runs),
        charts=[overlay(runs, key) for key in _FIRST if key in logged],
        more={key: overlay(runs, key) for key in logged if key not in _FIRST},
        values=_values(runs),
        events=events(runs),
        load=load_maps([heat_of(run) for run in runs]),
        layouts=layouts(runs),
        configuration=configuration(runs),
        environment=environment(runs),
    )


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


def overlay(runs: Sequence[RunRecord], quantity: str) -> Chart:
    """Draw one quantity of all runs."""
    what = f"{quantity} of {len(runs)} runs" if len(runs) > 1 else quantity
    draw = partial(draw_curves, quantity=quantity, lines=run_lines(runs, quantity))
    return chart(quantity, what, draw)


def _values(runs: Sequence[RunRecord]) -> tuple[Table, str]:
    steps = sorted({step for run in runs for step in run.curve.steps})
    heads, columns = ["step"], [list(map(str, steps))]
    for run in runs:
        for key in _FIRST[:3]:
            if key not in run.curve.scalars:
                continue
            known = dict(zip(run.curve.steps, run.curve.scalars[key], strict=True))
            heads.append(f"{run.name}: {key}")
            columns.append([_short(known.get(step)) for step in steps])
    return values_table(heads, columns)


def _short(value: float | None) -> str:
    return ABSENT if value is None or np.isnan(value) else f"{value:.5g}"
