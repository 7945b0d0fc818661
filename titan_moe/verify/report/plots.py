"""Plots of all pages, drawn by matplotlib as SVG in a page's colours."""

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

from titan_moe.verify.compare.noise.band import Band
from titan_moe.verify.compare.pinned_routes import Flips
from titan_moe.verify.compare.records import Array, FirstDifference, RunRecord, relative_difference
from titan_moe.verify.compare.verdict import Comparison
from titan_moe.verify.report.render import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BUSIEST = "/max_over_mean"
"""The end of the scalars "moe/LAYER/max_over_mean"."""
Panel = Callable[["Axes"], None]
"""Draws one chart."""

SOFT, GRID, BAD, BAND = (PALETTE[name][0] for name in ("soft", "grid", "bad", "band"))
SERIES = [PALETTE[f"series-{number}"][0] for number in range(1, 9)]
FLOAT32 = float(np.finfo(np.float32).eps)
"""Losses and norms are added up in float32: smaller differences mean nothing."""
_STYLE = files("titan_moe.verify.report") / "templates" / "charts.mplstyle"
_UNITS = {"loss": "nats per token", "grad_norm": "norm before clipping"}
_TITLES = {"lr": "learning rate", "grad_norm": "gradient norm"}
_BAND_STYLE: Any = {"color": BAND, "alpha": 0.35, "lw": 0}
_DASHES = ("-", "--", ":", "-.")
_FEW_POINTS = 12
_LONGEST_LABEL, _LABEL_INCHES = 80, 0.075
"""Characters of a legend's entry, and the width of a character."""
_MOST_LOADS = 4
"""Runs whose expert load is drawn."""
_MOST_ROWS = 300
"""Experts of all layers in one heat map; above, only the busiest of each layer are drawn."""
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_GROUP_ID = re.compile(r' id="[A-Za-z.0-9]+_[0-9]+"')
_HEAD = re.compile(r'.*?<svg [^>]*?viewBox="([^"]+)"[^>]*>', re.DOTALL)


# --- charts of a page -----------------------------------------------------------------------------


def charts(panels: Mapping[str, Panel]) -> dict[str, Markup]:
    """Returns one SVG element a panel, by the names that screen readers read out.

    Text stays text, colours follow the page's scheme, and no two charts share an id.
    """
    # Imported here: it costs half a second, and most callers never draw.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = {}
    for name, panel in panels.items():
        written = io.StringIO()
        with rc_context({"grid.color": GRID, "svg.hashsalt": name}, fname=str(_STYLE)):
            figure = Figure()
            axes = figure.subplots()
            panel(axes)
            _legend(figure, axes)
            figure.savefig(written, format="svg", metadata=_NO_METADATA)
        svg = _GROUP_ID.sub("", written.getvalue()).replace("'DejaVu Sans'", "system-ui")
        head = f'<svg class="chart" role="img" aria-label="{escape(name)}" viewBox='
        size = _HEAD.match(svg)
        assert size is not None
        svg = f'{head}"{size[1]}">{svg[size.end() :]}'
        for key, (light, _) in PALETTE.items():
            svg = svg.replace(light, f"var(--{key})")
        found[name] = Markup(svg)
    return found


def _legend(figure: "Figure", axes: "Axes") -> None:
    """Names each line below the chart."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        names = [textwrap.shorten(label, _LONGEST_LABEL, placeholder="...") for label in labels]
        columns = int(figure.get_figwidth() / (_LABEL_INCHES * (max(map(len, names)) + 6)))
        columns = min(max(columns, 1), 4)
        figure.legend(handles, names, loc="outside lower center", ncols=columns)


# --- curves ---------------------------------------------------------------------------------------


def draw_curves(
    axes: "Axes",
    *,
    runs: Sequence[RunRecord],
    quantity: str,
    band: Band | None = None,
    first: FirstDifference | None = None,
) -> None:
    """Draws one quantity of several runs, told apart by colour and dash, over the noise band, and
    marks where a curve stops being finite and where the runs first differ."""
    title = _TITLES.get(quantity, quantity.replace("_", " "))
    unit = "nats per token" if quantity.endswith("loss") else _UNITS.get(quantity, title)
    _frame(axes, title, unit)
    if band is not None and quantity in band.quantities:
        low, high = band.edges(quantity)
        axes.fill_between(band.steps, low, high, label="noise band", **_BAND_STYLE)
    known: list[float] = []
    for i, run in enumerate(runs):
        if quantity not in run.scalars:
            continue
        steps, values = np.asarray(run.steps), run.scalars[quantity]
        color, finite = SERIES[i % len(SERIES)], np.isfinite(values)
        known += values[finite].tolist()
        if quantity not in _UNITS:  # Logged in some steps only.
            steps, values = steps[finite], values[finite]
        elif not finite.all():
            step = steps[finite.argmin()]
            label = f"{run.name}: no finite value in step {step}"
            axes.axvline(step, color=color, lw=1.2, ls=":", label=label)
        # Wide lines below, so that all are seen where they agree.
        width = 2.6 - 1.6 * i / max(1, len(runs) - 1) if len(runs) > 1 else 1.2
        style = _DASHES[i // len(SERIES) % len(_DASHES)]
        _draw_line(axes, run.name, steps, values, color=color, ls=style, lw=width)
    if quantity == "grad_norm" and known and min(known) > 0:
        _log_scale(axes)
    if not known:
        _message(axes, "no finite value is logged")
    _mark_first(axes, first)


def draw_difference(axes: "Axes", *, quantity: str, comparison: Comparison) -> None:
    """Draws |candidate - baseline| / baseline on a log scale; with a band, distances from its
    middle, those of the control runs too."""
    _frame(axes, f"{_TITLES.get(quantity, quantity)}: relative difference", "share of the value")
    first, second = comparison.baseline, comparison.candidate
    ours, label = first.scalars[quantity], "candidate from baseline"
    band = comparison.band
    if band is not None and quantity in band.quantities:
        ours, label = band.location(quantity), "candidate from the band's middle"
        low, high = band.edges(quantity)
        half = np.maximum(high - ours, ours - low) / ours
        shown: Any = {"label": "half width of the band"} | _BAND_STYLE
        axes.fill_between(band.steps, FLOAT32 / 10, half, **shown)
        for i, control in enumerate(band.curves):
            name = "" if i else "control runs from the band's middle"
            off_S = _positive(ours, control.scalars[quantity])
            _draw_line(axes, name, band.steps, off_S, color=SOFT, lw=0.4)
    off_S = _positive(ours, second.scalars[quantity])
    _draw_line(axes, label, first.steps, off_S, color=SERIES[1])
    axes.axhline(FLOAT32, color=SOFT, lw=0.8, ls=":", label="resolution of float32")
    _log_scale(axes)
    _mark_first(axes, comparison.first)


def draw_flips(axes: "Axes", *, flips: Sequence[Flips]) -> None:
    """Draws each run's share of flipped tokens over steps; the candidate's, the first, on top."""
    _frame(axes, "flipped tokens of all layers", "% of tokens")
    for i, each in reversed(list(enumerate(flips))):
        shares_S = 100 * each.flipped_SL.mean(1) / each.total_S
        label = {0: "candidate", 1: "control runs"}.get(i, "")
        color, width = (SOFT, 0.4) if i else (SERIES[1], 1.2)
        _draw_line(axes, label, each.steps, shares_S, color=color, lw=width)


# --- expert load ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """The expert load of a run, or the difference of two."""

    name: str
    kind: str
    """"expert load", or "busiest experts" where single experts are too many or not logged."""
    steps: Sequence[int]
    layers: Mapping[str, Array]
    """Rows over the mean of the layer's experts, by MoE layer: [experts, S] or [1, S]."""
    signed: bool = False


def load_of(run: RunRecord) -> Load:
    """Expert load from the counts of rows if the run wrote them, else from its metrics."""
    layers = {
        name: (load_SE / np.maximum(load_SE.mean(1, keepdims=True), 1e-9)).T
        for name, load_SE in run.loads.items()
    }
    if layers and sum(map(len, layers.values())) <= _MOST_ROWS:
        return Load(run.name, "expert load", run.steps, layers)
    busiest = {name: rows_ES.max(0, keepdims=True) for name, rows_ES in layers.items()}
    for key, values in run.scalars.items():
        if key.endswith(_BUSIEST):
            busiest.setdefault(key.removeprefix("moe/").removesuffix(_BUSIEST), values[None])
    return Load(run.name, "busiest experts", run.steps, busiest)


def load_difference(baseline: RunRecord, candidate: RunRecord) -> Load:
    """The candidate's loads minus the baseline's."""
    first, second = load_of(baseline), load_of(candidate)
    layers = {
        name: second.layers[name] - rows_RS
        for name, rows_RS in first.layers.items()
        if name in second.layers and second.layers[name].shape == rows_RS.shape
    }
    return Load("candidate - baseline", first.kind, first.steps, layers, signed=True)


def load_panels(loads: Sequence[Load]) -> dict[str, Panel]:
    """Returns a heat map for each of the first loads that are known, all on one scale; differences
    have a scale to both sides of 0."""
    loads = [load for load in loads if load.layers][:_MOST_LOADS]
    ends = {False: 2.0, True: 1e-3}
    for load in loads:
        rows_RS = np.abs(np.concatenate(list(load.layers.values())))
        if len(finite := rows_RS[np.isfinite(rows_RS)]):
            # A few larger values are cut off.
            ends[load.signed] = max(ends[load.signed], float(np.quantile(finite, 0.998)))
    return {
        f"{load.kind}, {load.name}": partial(_draw_load, load=load, end=ends[load.signed])
        for load in loads
    }


def _draw_load(axes: "Axes", *, load: Load, end: float) -> None:
    """Draws layers from top to bottom, a row for each expert or for a layer's busiest one."""
    _frame(axes, f"{load.kind}, {load.name}", "")
    axes.grid(False)
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


# --- what charts have in common -------------------------------------------------------------------


def _frame(axes: "Axes", title: str, unit: str) -> None:
    axes.set(title=title, xlabel="step", ylabel=unit)
    axes.locator_params(axis="x", integer=True)


def _message(axes: "Axes", text: str) -> None:
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=SOFT)


def _log_scale(axes: "Axes") -> None:
    """Plain numbers at powers of ten, and between them where few powers are in view."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs = (1.0,) if high > 200 * low else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def _positive(first: Array, second: Array) -> Array:
    """The relative difference; NaN where it is 0, which a log scale has no place for."""
    found = relative_difference(first, second)
    return np.where(found > 0, found, np.nan)


def _draw_line(axes: "Axes", label: str, steps: Any, values: Array, **style: Any) -> None:
    """Draws a line over steps, with points where these are few; `style`: as of matplotlib."""
    # Legends leave out labels that start with an underscore; a run may be named so.
    shown = f"\N{ZERO WIDTH SPACE}{label}" if label else "_"
    marker = "o" if np.isfinite(values).sum() <= _FEW_POINTS else ""
    axes.plot(steps, values, label=shown, marker=marker, markersize=3, **{"lw": 1.2} | style)


def _mark_first(axes: "Axes", first: FirstDifference | None) -> None:
    if first is not None:
        label = f"first difference, step {first.step}"
        axes.axvline(first.step, color=BAD, lw=0.9, ls="-.", label=label)
