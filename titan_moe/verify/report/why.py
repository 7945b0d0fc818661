"""The explanation of a step of a run as one self-contained HTML page."""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from titan_moe.debug.why.findings import Explanation
from titan_moe.debug.why.run import Run
from titan_moe.debug.why.usual import logged_figures
from titan_moe.debug.why.words import Rows, sentences, tables
from titan_moe.verify.report.charts import (
    BAD,
    SERIES,
    SOFT,
    Chart,
    Line,
    chart,
    draw_curves,
    title,
)
from titan_moe.verify.report.render import Table, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AROUND = 100
"""Logged steps that are drawn before and after the step."""
_BARS = 12
_SEEN = 15
"""Rows of a table that are seen without a click."""
_LONGEST_NAME = 40


def why_page(found: Explanation, run: Run) -> str:
    """What stands out, curves around the step, parts of the gradient, and what was left out."""
    said, shown = sentences(found), tables(found)
    return render(
        "why.html",
        title=f"{found.run}: step {found.step}",
        kind="wrong" if found.is_unusual else "right",
        verdict=said[0],
        details=said[1:],
        notes=found.notes,
        start=f"Made again from {found.start}; layers and experts beside {found.compared_with}.",
        charts=[*_curves(found, run), _documents(found), _layers(found), _without(found)],
        links=[(_id(rows), rows.title) for rows in shown],
        sections=[
            {
                "id": _id(rows),
                "title": rows.title,
                "table": Table(rows.heads, rows.rows[:_SEEN], numbers=rows.numbers),
                "rest": Table(rows.heads, rows.rows[_SEEN:], numbers=rows.numbers),
            }
            for rows in shown
        ],
    )


def _id(rows: Rows) -> str:
    return rows.title.lower().replace(" ", "-")


def _curves(found: Explanation, run: Run) -> list[Chart]:
    near = [step for step in sorted(run.logged) if abs(step - found.step) <= _AROUND]
    known = {step: figures for step in near if (figures := logged_figures(run, step))}
    charts = []
    for quantity in ("loss", "grad_norm"):
        key = quantity.removeprefix("grad_")
        values = np.array([getattr(figures, key) for figures in known.values()])
        line = Line("the run's log", list(known), values, SERIES[0])
        draw = partial(_draw_curve, found=found, quantity=quantity, line=line)
        charts.append(chart(f"why {quantity}", f"{quantity} around the step", draw))
    return charts


def _draw_curve(axes: "Axes", *, found: Explanation, quantity: str, line: Line) -> None:
    draw_curves(axes, quantity, [line] if len(line.steps) else [])
    key = quantity.removeprefix("grad_")
    axes.axvline(found.step, color=BAD, lw=0.9, ls="-.", label=f"step {found.step}")
    for value, color, label in (
        (getattr(found.now, key), BAD, "made again"),
        (getattr(found.usual, key), SOFT, "usual"),
    ):
        if math.isfinite(value):
            axes.plot([found.step], [value], "D", color=color, markersize=5, label=label)


def _documents(found: Explanation) -> Chart:
    parts = found.documents[:_BARS]
    names = [f"sequence {part.row}: {part.name}" for part in parts]
    draw = partial(_draw_bars, names=names, values=[part.share for part in parts])
    told = "documents: share of the squared gradient norm"
    return _bars("why documents", told, draw, len(parts))


def _layers(found: Explanation) -> Chart:
    layers = found.layers[:_BARS]
    draw = partial(
        _draw_bars,
        names=[layer.name for layer in layers],
        values=[layer.norm for layer in layers],
        usual=[layer.usual for layer in layers],
    )
    return _bars("why layers", "layers: gradient norm", draw, len(layers))


def _without(found: Explanation) -> Chart:
    tried = found.without[:_BARS]
    draw = partial(
        _draw_bars,
        names=["nothing", *(each.what for each in tried)],
        values=[found.now.norm, *(each.figures.norm for each in tried)],
        usual=[found.usual.norm] * (len(tried) + 1),
    )
    return _bars("why without", "gradient norm with this left out", draw, len(tried) + 1)


def _bars(name: str, told: str, draw: partial[None], number: int) -> Chart:
    return chart(name, told, partial(draw, told=told), height=0.8 + 0.22 * max(number, 3))


def _draw_bars(
    axes: "Axes",
    *,
    told: str,
    names: Sequence[str],
    values: Sequence[float],
    usual: Sequence[float] = (),
) -> None:
    """The first on top; what is not finite has no bar, and says so."""
    from matplotlib.ticker import AutoLocator

    title(axes, told, "")
    places = list(range(len(names)))
    shown = [value if math.isfinite(value) else 0.0 for value in values]
    axes.barh(places, shown, color=SERIES[0], height=0.6)
    for place, value in zip(places, values, strict=True):
        if not math.isfinite(value):
            axes.text(0, place, " not finite", va="center", color=BAD)
    if usual:
        axes.plot(usual, places, "D", color=SERIES[1], markersize=5, label="usual")
    axes.set_yticks(places, [_shortened(name) for name in names])
    axes.invert_yaxis()
    axes.set(xlabel="", axisbelow=True)
    axes.xaxis.set_major_locator(AutoLocator())
    axes.grid(axis="y", visible=False)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:12]}...{name[15 - _LONGEST_NAME :]}"
