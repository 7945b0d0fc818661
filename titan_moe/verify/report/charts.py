"""Charts of reports, drawn by matplotlib as SVG in a page's colours."""

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

from titan_moe.verify.compare.comparison import Comparison
from titan_moe.verify.compare.noise.band import Band
from titan_moe.verify.compare.outcome import FirstDifference
from titan_moe.verify.compare.pinned_routes import Flips
from titan_moe.verify.compare.records import Array, RunRecord, relative_difference
from titan_moe.verify.report.data import Load, equal_steps
from titan_moe.verify.report.render import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = Callable[["Axes"], None]
"""Draws one chart."""

INK, SOFT, GRID, BAD, BAND = (PALETTE[name][0] for name in ("ink", "soft", "grid", "bad", "band"))
SERIES = [
    PALETTE[name][0] for name in ("one", "two", "three", "four", "five", "six", "seven", "eight")
]
FLOAT32 = float(np.finfo(np.float32).eps)
"""Losses and norms are added up in float32: smaller differences mean nothing."""
_STYLE: Any = {
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
    "axes.labelcolor": INK,
    "svg.fonttype": "none",
    "text.parse_math": False,
    # Merges the points of a line that fall on one pixel, so that long runs make no heavy page.
    "path.simplify_threshold": 1.0,
}
_INCHES = (6.4, 3.2)
_UNITS = {"loss": "nats per token", "grad_norm": "norm before clipping"}
_TITLES = {"lr": "learning rate", "grad_norm": "gradient norm"}
_DASHES = ("-", "--", ":", "-.")
_MOST_CONTROLS = 40
_FEW_POINTS = 12
_LONGEST_LABEL, _LABEL_INCHES = 80, 0.075
"""Characters of a legend's entry, and the width of a character."""
_GROUP_ID = re.compile(r' id="[A-Za-z.0-9]+_[0-9]+"')
_SIZE = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>')


# --- charts of a page -----------------------------------------------------------------------------


def charts(panels: Mapping[str, Panel]) -> list[Markup]:
    """Returns one SVG element a panel, by the names that screen readers read out.

    Text stays text, colours follow the page's scheme, and no two charts share an id.
    """
    # Imported here: it costs half a second, and most callers never draw.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = []
    for name, panel in panels.items():
        written = io.StringIO()
        with rc_context({**_STYLE, "svg.hashsalt": name, "font.size": 8}):
            figure = Figure(figsize=_INCHES, layout="constrained", facecolor="none")
            panel(figure.subplots())
            _legend(figure)
            figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
        svg = written.getvalue()
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        head = f'<svg class="chart" role="img" aria-label="{escape(name)}" viewBox='
        svg = _SIZE.sub(lambda match, head=head: f'{head}"{match[1]}">', svg)  # type: ignore[misc]
        svg = _GROUP_ID.sub("", svg).replace("'DejaVu Sans'", "system-ui")
        for key, (light, _) in PALETTE.items():
            svg = svg.replace(light, f"var(--{key})")
        found.append(Markup(svg))
    return found


def _legend(figure: "Figure") -> None:
    """Names each line of all charts once, below them."""
    axes: Any = figure.axes
    named = {
        label: handle
        for each in axes
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True)
    }
    names = [textwrap.shorten(label, _LONGEST_LABEL, placeholder="...") for label in named]
    if named:
        columns = int(_INCHES[0] / (_LABEL_INCHES * (max(map(len, names)) + 6)))
        figure.legend(
            list(named.values()),
            names,
            loc="outside lower center",
            ncols=min(max(columns, 1), 4),
            frameon=False,
            fontsize="small",
        )


# --- curves ---------------------------------------------------------------------------------------


def run_panel(
    runs: Sequence[RunRecord],
    quantity: str,
    *,
    band: Band | None = None,
    first: FirstDifference | None = None,
) -> Panel:
    """Draws one quantity of several runs, told apart by colour and dash.

    Args:
        band: drawn below the curves.
        first: marked at its step.
    """
    return partial(_draw_curves, runs=runs, quantity=quantity, band=band, first=first)


def _draw_curves(
    axes: "Axes",
    *,
    runs: Sequence[RunRecord],
    quantity: str,
    band: Band | None,
    first: FirstDifference | None,
) -> None:
    """Draws curves over the noise band, and marks where a curve stops being finite."""
    _frame(axes, _TITLES.get(quantity, quantity.replace("_", " ")), _UNITS.get(quantity, ""))
    if band is not None and quantity in band.quantities:
        low, high = band.edges(quantity)
        axes.fill_between(band.steps, low, high, color=BAND, alpha=0.35, lw=0, label="noise band")
    known: list[float] = []
    for i, run in enumerate(runs):
        if quantity not in run.curve.scalars:
            continue
        values, color = run.curve.scalars[quantity], SERIES[i % len(SERIES)]
        finite = np.isfinite(values)
        known += values[finite].tolist()
        if quantity in _UNITS and not finite.all():
            step = run.curve.steps[int(finite.argmin())]
            label = f"{run.name}: no finite value in step {step}"
            axes.axvline(step, color=color, lw=1.2, ls=":", label=label)
        # Wide lines below, so that all are seen where they agree.
        width = 2.6 - 1.6 * i / max(1, len(runs) - 1) if len(runs) > 1 else 1.2
        style = _DASHES[i // len(SERIES) % len(_DASHES)]
        joined = quantity not in _UNITS
        _draw_line(axes, run.name, run.curve.steps, values, color, style, width, joined=joined)
    if quantity == "grad_norm" and known and min(known) > 0:
        _log_scale(axes)
    if not known:
        logged = any(quantity in run.curve.scalars for run in runs)
        _message(axes, "no finite value" if logged else "not logged")
    _mark_first(axes, first)


def draw_difference(axes: "Axes", *, quantity: str, comparison: Comparison) -> None:
    """Draws |candidate - baseline| / baseline on a log scale; with a band, distances from its
    middle, those of the control runs too."""
    _frame(axes, f"{_TITLES.get(quantity, quantity)}: relative difference", "share of the value")
    first, second = comparison.baseline.curve, comparison.candidate.curve
    if steps := equal_steps(comparison, quantity):
        _message(axes, f"the same bits in all {steps} steps")
        return
    if quantity not in first.scalars or quantity not in second.scalars:
        _message(axes, "not logged in both runs")
        return
    ours, theirs = first.scalars[quantity], second.scalars[quantity]
    band = comparison.band
    label = "candidate from baseline"
    if band is not None and quantity in band.quantities:
        ours, label = band.location(quantity), "candidate from the band's middle"
        _draw_noise(axes, quantity, band)
    _draw_line(axes, label, first.steps, _positive(ours, theirs), SERIES[1])
    axes.axhline(FLOAT32, color=SOFT, lw=0.8, ls=":", label="resolution of float32")
    _log_scale(axes)
    _mark_first(axes, comparison.first)


# --- expert load ----------------------------------------------------------------------------------


def load_panels(loads: Sequence[Load]) -> dict[str, Panel]:
    """Returns a heat map a load, all on one scale; differences have a scale to both sides of 0."""
    ends: dict[bool, float] = {}
    for load in loads:
        rows = [np.abs(rows_RS[np.isfinite(rows_RS)]) for rows_RS in load.layers.values()]
        values = np.concatenate(rows) if rows else np.zeros(0)
        # A few larger values are cut off.
        end = float(np.quantile(values, 0.998)) if len(values) else 0.0
        least = 1e-3 if load.signed else 2.0
        ends[load.signed] = max(ends.get(load.signed, least), end)
    return {
        f"{load.kind}, {load.name}": partial(_draw_load, load=load, end=ends[load.signed])
        for load in loads
    }


def _draw_load(axes: "Axes", *, load: Load, end: float) -> None:
    """Draws layers from top to bottom, a row for each expert or for a layer's busiest one."""
    _frame(axes, f"{load.kind}, {load.name}", "")
    axes.grid(False)
    if not load.layers or not len(load.steps):
        _message(axes, "not logged")
        return
    rows_RS = np.concatenate(list(load.layers.values()))
    if load.signed and not rows_RS.any():
        _message(axes, "no difference")
        return
    image = axes.imshow(
        np.ma.masked_invalid(rows_RS),
        aspect="auto",
        vmin=-end if load.signed else 0,
        vmax=end,
        extent=(load.steps[0] - 0.5, load.steps[-1] + 0.5, len(rows_RS) - 0.5, -0.5),
        cmap="RdBu_r" if load.signed else "viridis",
    )
    edges = np.cumsum([0, *map(len, load.layers.values())]) - 0.5
    if len(rows_RS) > len(load.layers):
        axes.hlines(edges[1:-1], *axes.get_xlim(), color="white", lw=1)
    every = -(-len(load.layers) // 12)
    axes.set_yticks(((edges[1:] + edges[:-1]) / 2)[::every], list(load.layers)[::every])
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=30)
    bar.set_label("rows over the layer's mean")
    bar.outline.set_visible(False)  # type: ignore[operator]


# --- flips ----------------------------------------------------------------------------------------


def draw_flips(axes: "Axes", *, flips: Sequence[Flips]) -> None:
    """Draws each run's share of flipped tokens over steps; the candidate's, the first, on top."""
    _frame(axes, "flipped tokens of all layers", "% of tokens")
    for i, each in reversed(list(enumerate(flips))):
        shares_S = 100 * each.flipped_SL.mean(1) / each.total_S
        label = {0: "candidate", 1: "control runs"}.get(i, "")
        color, width = (SOFT, 0.4) if i else (SERIES[1], 1.2)
        _draw_line(axes, label, each.steps, shares_S, color, width=width)


# --- parts of a chart -----------------------------------------------------------------------------


def _frame(axes: "Axes", text: str, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(text, loc="left", fontsize="medium", fontweight="bold")
    axes.set(xlabel="step", ylabel=unit, facecolor="none")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=GRID, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(color=SOFT)
    axes.tick_params(which="minor", length=0)


def _message(axes: "Axes", text: str) -> None:
    if not axes.has_data():
        axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=SOFT)


def _log_scale(axes: "Axes") -> None:
    """Powers of ten as plain text, and numbers between them where few powers are in view."""
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


def _draw_noise(axes: "Axes", quantity: str, band: Band) -> None:
    low, high = band.edges(quantity)
    middle = band.location(quantity)
    with np.errstate(divide="ignore", invalid="ignore"):
        half = np.maximum(high - middle, middle - low) / np.abs(middle)
    floor = np.full(len(half), FLOAT32 / 10)
    style: Any = {"color": BAND, "alpha": 0.35, "lw": 0, "label": "half width of the band"}
    axes.fill_between(band.steps, floor, half, **style)
    for i, control in enumerate(band.curves[:_MOST_CONTROLS]):
        label = "" if i else "control runs from the band's middle"
        values = _positive(middle, band.values(control, quantity))
        _draw_line(axes, label, band.steps, values, SOFT, width=0.4)


def _positive(first: Array, second: Array) -> Array:
    """The relative difference; NaN where it is 0, which a log scale has no place for."""
    found = relative_difference(first, second)
    return np.where(found > 0, found, np.nan)


def _draw_line(
    axes: "Axes",
    label: str,
    steps: Sequence[int],
    values: Array,
    color: str,
    style: str = "-",
    width: float = 1.2,
    *,
    joined: bool = False,
) -> None:
    """Draws one line. `joined` connects points across steps without a finite value."""
    finite, x = np.isfinite(values), np.asarray(steps)
    y = np.where(finite, values, np.nan)
    if joined:
        x, y = x[finite], y[finite]
    # Legends leave out labels that start with an underscore; a run may be named so.
    shown = f"\N{ZERO WIDTH SPACE}{label}" if label else "_"
    marker = "o" if finite.sum() <= _FEW_POINTS else ""
    more: Any = {"color": color, "lw": width, "marker": marker, "markersize": 3}
    axes.plot(x, y, style, label=shown, **more)


def _mark_first(axes: "Axes", first: FirstDifference | None) -> None:
    if first is not None:
        label = f"first difference, step {first.step}"
        axes.axvline(first.step, color=BAD, lw=0.9, ls="-.", label=label)
