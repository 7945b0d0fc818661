"""One or several runs as one self-contained HTML page; nothing is judged."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from titan_moe.verify.compare.records import NORM_OF, RunRecord
from titan_moe.verify.report.charts import draw_curves, legend, run_lines, svg
from titan_moe.verify.report.heat import heat_of, load_maps
from titan_moe.verify.report.sections import (
    configurations,
    environments,
    layouts,
    loud,
    report,
    values_table,
)
from titan_moe.verify.report.style import folded, paragraph
from titan_moe.verify.report.words import ABSENT, all_notes, layout_words, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIRST = ("loss", "grad_norm", "lr", "tokens_per_second")


def runs_page(title: str, runs: Sequence[RunRecord]) -> str:
    """Curves, expert load, layouts, configurations and environments of the runs."""
    sections = [
        ("curves", "Curves", _curves(runs)),
        ("load", "Expert load", load_maps([heat_of(run) for run in runs])),
        ("layouts", "Layouts", layouts(runs)),
        ("configuration", "Configuration", configurations(runs)),
        ("environment", "Environment", environments(runs)),
    ]
    return report(title, _top(runs), sections)


def _top(runs: Sequence[RunRecord]) -> str:
    lines = [paragraph(_last(run)) for run in runs]
    return f"<div class=top id=runs>{''.join(lines)}</div>{loud('Note', all_notes(runs))}"


def _last(run: RunRecord) -> str:
    """Where a run stands."""
    known = [f"step {run.curve.steps[-1]}"]
    for key in ("loss", "grad_norm", "validation_loss"):
        at = np.flatnonzero(np.isfinite(run.curve.scalars.get(key, [])))
        if len(at):
            value = f"{key.replace('_', ' ')} {number(float(run.curve.scalars[key][at[-1]]))}"
            late = at[-1] == len(run.curve.steps) - 1
            known.append(value if late else f"{value} in step {run.curve.steps[at[-1]]}")
    return f"{run.name} ({layout_words(run)}): {', '.join(known)}"


def _curves(runs: Sequence[RunRecord]) -> str:
    logged = list(dict.fromkeys(key for run in runs for key in run.curve.scalars))
    logged = [key for key in logged if not key.startswith((NORM_OF, "moe/"))]
    first = "".join(_chart(runs, key) for key in _FIRST if key in logged)
    others = [key for key in logged if key not in _FIRST]
    more = "".join(_chart(runs, key) for key in others)
    if more:
        more = folded(f"More curves: {', '.join(others)}", f"<div class=charts>{more}</div>")
    return f"<div class=charts>{first}</div>{more}{_values(runs)}"


def _chart(runs: Sequence[RunRecord], quantity: str) -> str:
    def draw(figure: "Figure") -> None:
        draw_curves(figure.subplots(), quantity, run_lines(runs, quantity))
        legend(figure)

    drawn: Callable[[Figure], None] = draw
    what = f"{quantity} of {len(runs)} runs" if len(runs) > 1 else quantity
    return f"<div>{svg(quantity, what, drawn)}</div>"


def _values(runs: Sequence[RunRecord]) -> str:
    steps = sorted({step for run in runs for step in run.curve.steps})
    heads, columns = ["step"], [list(map(str, steps))]
    for run in runs:
        for key in ("loss", "grad_norm"):
            if key not in run.curve.scalars:
                continue
            known = dict(zip(run.curve.steps, run.curve.scalars[key], strict=True))
            heads.append(f"{run.name}: {key}")
            columns.append([number(known[step]) if step in known else ABSENT for step in steps])
    return values_table(heads, list(zip(*columns, strict=True)))
