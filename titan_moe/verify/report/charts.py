"""The curves of a report: for a page as SVG in its colours with an HTML legend, or for a PNG."""

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

from titan_moe.verify.compare.comparison import Comparison
from titan_moe.verify.compare.noise.band import Band
from titan_moe.verify.compare.records import Array, Curve, RunRecord
from titan_moe.verify.report.data import common_steps, equal_steps, relative_difference, thinned
from titan_moe.verify.report.render import PALETTE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

INK, SOFT, GRID, BAD, BAND = (PALETTE[name][0] for name in ("ink", "soft", "grid", "bad", "band"))
FLOAT32 = float(np.finfo(np.float32).eps)
"""Losses and norms are added up in it: what is nearer than this is the same."""
SERIES = [
    PALETTE[name][0] for name in ("one", "two", "three", "four", "five", "six", "seven", "eight")
]
UNITS = {"loss": "nats per token", "grad_norm": "norm before clipping"}
_TITLES = {"lr": "learning rate", "grad_norm": "gradient norm"}
_DASHES = {"-": "", "--": "6 3", ":": "2 2", "-.": "6 2 2 2"}
"""Of matplotlib and of SVG."""
_MARKERS = {"|": "|", "o": "\N{BLACK CIRCLE}", "D": "\N{BLACK DIAMOND}"}
_MOST_CONTROLS = 40
_FEW_POINTS, _MANY_POINTS = 12, 300
_LONGEST_LABEL, _LABEL_INCHES = 80, 0.08
"""Characters of a legend's entry in a picture, and the width of one."""
_ID = re.compile(r' id="[A-Za-z.0-9]+_[0-9]+"')
_FONT = re.compile(r"'DejaVu Sans'[^;\"]*")
_SIZE = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>')


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    label: str
    steps: Sequence[int]
    values: Array
    color: str
    style: str = "-"
    width: float = 1.2


@dataclass(frozen=True)
class LegendEntry:
    """A name and how it is drawn; colours are the page's."""

    label: str
    kind: str
    """"line", "area", or a character like the marker."""
    color: str
    width: float = 1.2
    dash: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart of a page."""

    svg: Markup
    legend: Sequence[LegendEntry]


def settings(
    font_size: float, more: Mapping[str, Any] | None = None
) -> AbstractContextManager[None]:
    """What figures that are drawn in it look like."""
    from matplotlib import rc_context

    colors = {"text.color": INK, "axes.labelcolor": INK}
    known: Any = {"svg.fonttype": "none", "font.size": font_size, **colors, **(more or {})}
    return rc_context(known)


def chart(name: str, what: str, draw: Callable[["Axes"], None], *, height: float = 2.9) -> Chart:
    """A chart as an element of a page: text is text, colours are the page's, no two charts share
    an id, the same input gives the same bytes. `what` describes it to screen readers."""
    # Imported here: it costs half a second, and most of what is imported beside it never draws.
    from matplotlib.figure import Figure

    text = io.StringIO()
    with settings(8, {"svg.hashsalt": name}):
        drawn = Figure(figsize=(6.4, height), layout="constrained", facecolor="none")
        axes = drawn.subplots()
        draw(axes)
        drawn.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        named = zip(*axes.get_legend_handles_labels(), strict=True)
        entries = {label: _entry(handle, label) for handle, label in named}
    found = text.getvalue()
    found = re.sub(r"<metadata>.*?</metadata>", "", found[found.index("<svg") :], flags=re.DOTALL)
    head = f'<svg class="chart" role="img" aria-label="{escape(what)}" viewBox='
    found = _SIZE.sub(lambda match: f'{head}"{match[1]}">', found)
    found = _FONT.sub("system-ui, sans-serif", _ID.sub("", found))
    for key, (light, _) in PALETTE.items():
        found = found.replace(light, f"var(--{key})")
    return Chart(Markup(found), list(entries.values()))


def _entry(handle: "Artist", label: str) -> LegendEntry:
    """What a legend shows of a line, of points or of a filled area."""
    from matplotlib.colors import to_hex
    from matplotlib.lines import Line2D

    label = label.strip("\N{ZERO WIDTH SPACE}")
    known = {light: f"var(--{key})" for key, (light, _) in PALETTE.items()}
    if not isinstance(handle, Line2D):
        color = to_hex(handle.get_facecolor()[0])  # type: ignore[attr-defined]
        return LegendEntry(label, "area", known.get(color, color))
    color = to_hex(handle.get_color())
    style = str(handle.get_linestyle())
    kind = "line" if style in _DASHES else _MARKERS[str(handle.get_marker())]
    width = min(max(handle.get_linewidth(), 1.5), 3.0)
    return LegendEntry(label, kind, known.get(color, color), width, _DASHES.get(style, ""))


def run_lines(runs: Sequence[RunRecord], quantity: str) -> list[Line]:
    """One line for each run that has the quantity, told apart by colour and dash."""
    return [
        Line(
            run.name,
            run.curve.steps,
            run.curve.scalars[quantity],
            SERIES[i % len(SERIES)],
            list(_DASHES)[i // len(SERIES) % len(_DASHES)],
            # Wide ones below, so that all are seen where they agree.
            max(1.0, 2.6 - i * 1.6 / max(1, len(runs) - 1)) if len(runs) > 1 else 1.2,
        )
        for i, run in enumerate(runs)
        if quantity in run.curve.scalars
    ]


def pair_lines(comparison: Comparison, quantity: str) -> list[Line]:
    """The baseline wide, the candidate thin above it: both are visible where they agree."""
    pair = (comparison.baseline, "-", 2.6), (comparison.candidate, "--", 1.2)
    return [
        Line(run.name, run.curve.steps, run.curve.scalars[quantity], color, style, width)
        for color, (run, style, width) in zip(SERIES, pair, strict=False)
        if quantity in run.curve.scalars
    ]


def draw_curves(
    axes: "Axes",
    quantity: str,
    lines: Sequence[Line],
    *,
    band: Band | None = None,
    first: int | None = None,
) -> None:
    """The curves, the noise band behind them, and a mark where a curve stops being finite."""
    title(axes, _TITLES.get(quantity, quantity.replace("_", " ")), UNITS.get(quantity, ""))
    if band is not None and quantity in band.quantities:
        low, high = band.edges(quantity)
        axes.fill_between(band.steps, low, high, color=BAND, alpha=0.35, lw=0, label="noise band")
    for line in lines:
        own = np.isfinite(line.values)
        if quantity not in UNITS:
            # Of what is measured now and then, the points are joined.
            steps = np.asarray(line.steps)[own].tolist()
            line = replace(line, steps=steps, values=line.values[own])
        elif not own.all():
            step = line.steps[int(np.flatnonzero(~own)[0])]
            name = f"{line.label}: no finite value in step {step}"
            axes.axvline(step, color=line.color, lw=1.2, ls=":", label=name)
        _draw_line(axes, line)
    known = [v for line in lines for v in line.values[np.isfinite(line.values)]]
    if quantity == "grad_norm" and known and min(known) > 0:
        log_scale(axes)
    _show_steps(axes, [line.steps for line in lines])
    if not known:
        message(axes, "no finite value" if lines else "not logged")
    _mark_first(axes, first)


def draw_difference(axes: "Axes", quantity: str, comparison: Comparison) -> None:
    """|candidate - baseline| / baseline on a log scale, beside how far control runs lie apart and
    what float32 resolves."""
    title(axes, f"{_TITLES.get(quantity, quantity)}: relative difference", "share of the value")
    first, second = comparison.baseline.curve, comparison.candidate.curve
    if steps := equal_steps(comparison, quantity):
        message(axes, f"the same bits in all {steps} steps")
        return
    common = common_steps(first, second)
    if not common.steps or quantity not in first.scalars or quantity not in second.scalars:
        message(axes, "no step that both runs logged")
        return
    found = relative_difference(
        first.scalars[quantity][common.first], second.scalars[quantity][common.second]
    )
    floor = _floor(found)
    band = comparison.band
    if band is not None and quantity in band.quantities:
        _draw_noise(axes, quantity, band, second, floor)
    if not (found == 0).all():
        shown = np.where(found > 0, found, np.nan)
        _draw_line(axes, Line("candidate from baseline", common.steps, shown, SERIES[1]))
    if (equal := found == 0).any():
        at = np.array(common.steps)[equal]
        label = f"equal bits ({equal.sum()} of {len(found)} steps)"
        axes.plot(at, np.full(len(at), floor), "|", color=SERIES[2], markersize=5, label=label)
    axes.axhline(FLOAT32, color=SOFT, lw=0.8, ls=":", label="resolution of float32")
    log_scale(axes)
    axes.set_ylim(bottom=floor / 2)
    _show_steps(axes, [first.steps, second.steps])
    _mark_first(axes, comparison.first.step if comparison.first else None)


def draw_statistics(axes: "Axes", comparison: Comparison) -> None:
    """The control runs' own statistics, the limit and the candidate's, on one line."""
    band, check = comparison.band, comparison.band_check
    assert band is not None and check is not None
    title(axes, "how far out each curve is", "")
    controls = np.asarray(band.statistics, dtype=float)
    axes.plot(controls, np.zeros(len(controls)), "o", color=SOFT, alpha=0.6, label="control runs")
    axes.axvline(band.limit, color=INK, lw=1, ls="--", label=f"limit {band.limit:.3g}")
    statistic = check.statistic
    if np.isfinite(statistic):
        color = SERIES[0] if check.inside else SERIES[1]
        label = f"candidate {statistic:.3g}"
        axes.plot([statistic], [0], "D", color=color, markersize=8, label=label)
        if statistic > 10 * band.limit:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(_plain)
    axes.set(xlabel="distance over what noise may do", yticks=[])
    axes.spines["left"].set_visible(False)
    axes.grid(False)


def legend(target: "FigureBase", width: float) -> None:
    """Below all charts of a figure of this width in inches: each name once, none over another."""
    charts: Any = target.axes
    named = {
        label: handle
        for axes in charts
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    names = [textwrap.shorten(label, _LONGEST_LABEL, placeholder="...") for label in named]
    columns = int(width / (_LABEL_INCHES * (max(map(len, names), default=0) + 6)))
    style = {"frameon": False, "fontsize": "small", "labelcolor": INK}
    if named:
        style["ncols"] = min(max(columns, 1), 4)
        target.legend(list(named.values()), names, loc="outside lower center", **style)


def title(axes: "Axes", text: str, unit: str) -> None:
    """What a chart shows, and a plain frame for it."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(text, loc="left", fontsize="medium", fontweight="bold")
    axes.set(xlabel="step", ylabel=unit, facecolor="none")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=GRID, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(color=SOFT, labelcolor=INK)
    axes.tick_params(which="minor", length=0)


def message(axes: "Axes", text: str) -> None:
    """Text where there is nothing to draw."""
    if not axes.has_data():
        axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=SOFT)


def log_scale(axes: "Axes") -> None:
    """Powers of ten as plain text, and 2 and 5 between them where few are in view."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs: tuple[float, ...] = (1.0,)
    if high < 200 * low:
        subs = (1.0, 2.0, 5.0) if high > 8 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axes.yaxis.set_major_formatter(_plain)
    axes.yaxis.set_minor_formatter(NullFormatter())


def _plain(value: float, _: float | None = None) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _floor(found: Array) -> float:
    positive = found[(found > 0) & np.isfinite(found)]
    return float(min(positive.min(), FLOAT32)) / 3 if len(positive) else FLOAT32 / 3


def _draw_noise(axes: "Axes", quantity: str, band: Band, candidate: Curve, floor: float) -> None:
    low, high = band.edges(quantity)
    middle = band.location(quantity)
    with np.errstate(divide="ignore", invalid="ignore"):
        half = np.maximum(high - middle, middle - low) / np.abs(middle)
    label = "half width of the band"
    axes.fill_between(
        band.steps, np.full(len(half), floor / 2), half, color=BAND, alpha=0.35, lw=0, label=label
    )
    for i, control in enumerate(band.controls[:_MOST_CONTROLS]):
        own = relative_difference(middle, band.values(control, quantity))
        name = "control runs from the band's middle" if i == 0 else "_"
        _draw_line(axes, Line(name, band.steps, np.where(own > 0, own, np.nan), SOFT, "-", 0.4))
    if list(candidate.steps) == list(band.steps):
        own = relative_difference(middle, band.values(candidate, quantity))
        own = np.where(own > 0, own, np.nan)
        _draw_line(axes, Line("candidate from the band's middle", band.steps, own, SERIES[6], "--"))


def _draw_line(axes: "Axes", line: Line) -> None:
    values = np.where(np.isfinite(line.values), line.values, np.nan)
    few = np.isfinite(values).sum() <= _FEW_POINTS
    steps, shown = thinned(line.steps, values)
    # Wide lines of many points would cover each other whole.
    width = line.width if len(steps) <= _MANY_POINTS else min(line.width, 1.4)
    # Legends leave out what starts with an underscore; a run may be named so.
    label = line.label if line.label == "_" else f"\N{ZERO WIDTH SPACE}{line.label}"
    axes.plot(
        steps,
        shown,
        line.style,
        color=line.color,
        lw=width,
        label=label,
        marker="o" if few else "",
        markersize=3,
    )


def _show_steps(axes: "Axes", steps: Sequence[Sequence[int]]) -> None:
    """The same steps in all charts of the same runs, whatever is drawn of them."""
    if steps:
        low, high = min(own[0] for own in steps), max(own[-1] for own in steps)
        margin = max((high - low) / 50, 0.5)
        axes.set_xlim(low - margin, high + margin)


def _mark_first(axes: "Axes", step: int | None) -> None:
    if step is not None:
        axes.axvline(step, color=BAD, lw=0.9, ls="-.", label=f"first difference, step {step}")
