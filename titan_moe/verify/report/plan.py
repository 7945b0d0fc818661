"""The page of a plan: the parts of each layout's step as bars, and its table."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from titan_moe.verify.report.plots import SERIES, charts
from titan_moe.verify.report.render import render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Steps = Sequence[tuple[str, Mapping[str, float]]]
"""Layouts, with the seconds of their steps by region."""
_HATCHES = ("", "////", "....")


def plan_page(heading: Sequence[str], steps: Steps, table: Sequence[str]) -> str:
    """Returns the page of layouts, fastest first."""
    chart = charts({"parts of a step": partial(draw_steps, steps=steps)})
    return render("plan.html", title="Plan", heading=heading, charts=chart, table="\n".join(table))


def draw_steps(axes: "Axes", *, steps: Steps, title: str = "estimated seconds of a step") -> None:
    """Draws a bar for each layout, of the regions that take a hundredth of some step."""
    names, seconds = zip(*steps, strict=True)
    regions = [
        region
        for region in seconds[0]
        if any(each[region] > 0.01 * sum(each.values()) for each in seconds)
    ]
    left_L, places_L = np.zeros(len(names)), np.arange(len(names))
    for number, region in enumerate(regions):
        values_L = np.array([each[region] for each in seconds])
        axes.barh(
            places_L,
            values_L,
            left=left_L,
            label=region,
            color=SERIES[number % len(SERIES)],
            hatch=_HATCHES[number // len(SERIES)],
            edgecolor="white",
            lw=0.3,
        )
        left_L += values_L
    axes.set_yticks(places_L, names)
    axes.invert_yaxis()
    axes.set(title=title, xlim=(0, 1.02 * left_L.max()))
