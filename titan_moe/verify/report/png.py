"""A report as one picture for a chat message: what one sees at a glance."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_moe.verify.compare.comparison import Comparison, Verdict
from titan_moe.verify.compare.records import Array, RunRecord
from titan_moe.verify.report.charts import (
    BAD,
    INK,
    SOFT,
    draw_curves,
    draw_difference,
    legend,
    message,
    pair_lines,
    run_lines,
    settings,
    title,
)
from titan_moe.verify.report.heat import (
    DIFFERENCE,
    LEVELS,
    Heat,
    difference_of,
    heat_of,
    levels,
    scale_end,
    shades,
)
from titan_moe.verify.report.render import PALETTE
from titan_moe.verify.report.words import all_notes, detail, labelled, layout_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_COLORS = {
    Verdict.IDENTICAL: PALETTE["good"][0],
    Verdict.INSIDE: PALETTE["good"][0],
    Verdict.DIFFERENT: BAD,
    Verdict.UNJUDGED: PALETTE["warn"][0],
}
_WIDTH, _DOTS = 13.0, 100
_BODY, _LINE = 8.0, 0.24
"""Heights in inches, of the charts and of a line above them."""
_LETTERS = 150
_MOST_LINES = 10
_SIGN = "\N{WARNING SIGN}"
_MOST_ROWS = 300
"""Experts of all layers; above, only the busiest of each layer are drawn."""
_MOST_RUNS = 2
"""Runs whose expert load has a place."""


def comparison_png(comparison: Comparison, path: Path) -> None:
    """Verdict, loss with the band, relative difference, gradient norm and expert load."""
    comparison = labelled(comparison)
    first = comparison.first.step if comparison.first else None
    pair = comparison.baseline, comparison.candidate
    lines = [detail(comparison)]
    if comparison.replayed is not None:
        lines.append(f"With the baseline's routing: {comparison.replayed.verdict.value}.")
    lines += [f"{_SIGN} {line}" for line in [*comparison.caveats, *all_notes(pair)]]
    with settings(9):
        head = f"{comparison.title}: {comparison.verdict.value}"
        drawn, charts = _empty(head, lines, _COLORS[comparison.verdict])
        grid = charts.add_gridspec(2, 4)
        for row, quantity in enumerate(("loss", "grad_norm")):
            axes = charts.add_subplot(grid[row, :2])
            lines_of = pair_lines(comparison, quantity)
            draw_curves(axes, quantity, lines_of, band=comparison.band, first=first)
        draw_difference(charts.add_subplot(grid[0, 2:]), "loss", comparison)
        heats, difference = [heat_of(run) for run in pair], difference_of(*pair)
        _draw_load(charts.add_subplot(grid[1, 2]), heats[1], "expert load, candidate", heats)
        axes = charts.add_subplot(grid[1, 3])
        _draw_load(axes, difference, "candidate - baseline", [difference])
        legend(charts, _WIDTH)
        drawn.savefig(path, dpi=_DOTS)


def runs_png(runs: Sequence[RunRecord], path: Path) -> None:
    """Loss, gradient norm and learning rate of all runs, and the expert load of the first two."""
    head = ", ".join(f"{run.name} ({layout_words(run)})" for run in runs)
    with settings(9):
        notes = [f"{_SIGN} {line}" for line in all_notes(runs)]
        drawn, charts = _empty(head, notes, INK)
        grid = charts.add_gridspec(2, 4)
        for place, quantity in (
            (grid[0, :2], "loss"),
            (grid[0, 2:], "grad_norm"),
            (grid[1, :2], "lr"),
        ):
            draw_curves(charts.add_subplot(place), quantity, run_lines(runs, quantity))
        heats, shown = [heat_of(run) for run in runs], runs[:_MOST_RUNS]
        for column, run in enumerate(shown):
            place = grid[1, 2:] if len(shown) == 1 else grid[1, 2 + column]
            axes = charts.add_subplot(place)
            _draw_load(axes, heat_of(run), f"expert load, {run.name}", heats)
        legend(charts, _WIDTH)
        drawn.savefig(path, dpi=_DOTS)


def _empty(head: str, lines: Sequence[str], color: str) -> tuple["Figure", "SubFigure"]:
    """A figure with its words on top, and the part of it that is left for charts."""
    # Imported here: it costs half a second, and most of what is imported beside it never draws.
    from matplotlib.figure import Figure

    heads = textwrap.wrap(head, _LETTERS * 3 // 5, max_lines=3)
    below = [
        (part, PALETTE["warn"][0] if line.startswith(_SIGN) else INK)
        for line in lines
        for part in textwrap.wrap(line, _LETTERS)
    ]
    if len(below) > _MOST_LINES:
        left = f"\N{HORIZONTAL ELLIPSIS} {len(below) - _MOST_LINES + 1} more lines in the page"
        below = [*below[: _MOST_LINES - 1], (left, INK)]
    above = _LINE * (1.5 * len(heads) + len(below) + 0.8)
    drawn = Figure(figsize=(_WIDTH, above + _BODY), layout="constrained", facecolor="white")
    parts: Any = drawn.subfigures(2, 1, height_ratios=(above, _BODY))
    top, charts = parts
    at = 1 - 0.4 * _LINE / above
    for line in heads:
        bold = {"color": color, "fontsize": 16, "fontweight": "bold"}
        top.text(0.01, at, line, va="top", parse_math=False, **bold)
        at -= 1.5 * _LINE / above
    for line, shade in below:
        top.text(0.01, at, line, color=shade, fontsize=10.5, va="top", parse_math=False)
        at -= _LINE / above
    return drawn, charts


def _draw_load(axes: "Axes", heat: Heat, head: str, alike: Sequence[Heat]) -> None:
    """Layers from top to bottom, in each its experts, or its busiest one where they are many; on
    the scale of all maps of `alike`, as on the page."""
    from matplotlib.ticker import MaxNLocator

    by_layer = {layer: load_SE.T for layer, load_SE in heat.loads.items()}
    maps: list[Array] = [load_SE for each in alike for load_SE in each.loads.values()]
    if not by_layer or sum(map(len, by_layer.values())) > _MOST_ROWS:
        by_layer = {layer: values_S[None] for layer, values_S in heat.busiest.items()}
        maps = [values_S for each in alike for values_S in each.busiest.values()]
        head = head.replace("expert load", "busiest experts")
    title(axes, head, "")
    if not by_layer or not len(heat.steps):
        message(axes, "not logged")
        return
    rows_RS: Array = np.concatenate(list(by_layer.values()))
    known = rows_RS[np.isfinite(rows_RS)].any()
    end = scale_end(maps, heat.colors)
    level = levels(rows_RS, heat.colors, end)
    ends = heat.steps[0] - 0.5, heat.steps[-1] + 0.5, len(rows_RS) - 0.5, -0.5
    picture = axes.imshow(
        np.ma.masked_equal(level, LEVELS),
        aspect="auto",
        interpolation="nearest",
        vmin=-0.5,
        vmax=LEVELS - 0.5,
        extent=ends,
        cmap=shades(heat.colors),
    )
    if heat.colors == DIFFERENCE and not known:
        message(axes, "no difference")
    edges = np.cumsum([0, *map(len, by_layer.values())]) - 0.5
    if len(rows_RS) > len(by_layer) and known:
        axes.hlines(edges[1:-1], *ends[:2], color=SOFT, lw=0.6)
    every = -(-len(by_layer) // 12)
    axes.set_yticks(((edges[1:] + edges[:-1]) / 2)[::every], list(by_layer)[::every], fontsize=7)
    axes.grid(False)
    if not known:
        return
    bar = axes.figure.colorbar(picture, ax=axes, orientation="horizontal", pad=0.02, aspect=40)
    bar.set_label("rows over the layer's mean", fontsize=7)
    last = LEVELS - 1
    if heat.colors == DIFFERENCE:
        bar.set_ticks([0, last / 2, last], labels=[f"-{end:.2g}", "0", f"+{end:.2g}"])
    else:
        bar.set_ticks([-0.5, last / 2, last + 0.5], labels=["0", f"{end / 2:.2g}", f"{end:.2g}"])
    bar.ax.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
