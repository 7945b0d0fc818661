"""Heat maps of a page: rows by name and number, steps from left to right, as embedded images."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from titan_moe.verify.compare.records import Array, RunRecord
from titan_moe.verify.report.data import common_steps, over_mean
from titan_moe.verify.report.style import folded, paragraph

if TYPE_CHECKING:
    from matplotlib.colors import ListedColormap

STYLE = """
.heat { display: grid; gap: .25rem .8rem; align-items: center; margin: .4rem 0;
  grid-template-columns: max-content repeat(var(--columns), minmax(8rem, 1fr)) }
.heat b { font-size: 12px; overflow-wrap: anywhere }
.heat .span { display: flex; flex-direction: column; justify-content: space-between;
  align-self: stretch }
.heat small { color: var(--soft); display: block }
.heat img { width: 100%; display: block; image-rendering: pixelated;
  outline: 1px solid var(--line) }
.ends { display: flex; justify-content: space-between; color: var(--soft); font-size: 11px }
.scale { display: inline-flex; gap: .4rem; align-items: center; margin: .2rem 2rem .2rem 0 }
.scale img { width: 9rem; height: .8rem; outline: 1px solid var(--line) }
.narrow { overflow-x: auto } .narrow .heat { min-width: 34rem }
"""
LOAD, DIFFERENCE = "load", "difference"
"""The colours of a map: from 0 up, or to both sides of 0."""
_LEVELS = 15
"""Colours of a map; one more stands for what is no number. 16 fit into 4 bits."""
_MOST_COLUMNS = 100
_MANY_EXPERTS = 256
"""Maps of more experts in all layers are folded, and the candidate's own is left out."""
_MOST_RUNS = 4
"""Runs of many experts whose maps are drawn: each is a megabyte."""
_ORANGE, _BLUE = (213, 94, 0), (0, 114, 178)


@dataclass(frozen=True)
class Heat:
    """What is shown of a run's expert load."""

    name: str
    steps: Sequence[int]
    busiest: Mapping[str, Array]
    """By MoE layer, rows of the busiest expert over the mean, [S]."""
    loads: Mapping[str, Array]
    """By MoE layer, rows of each expert over the mean, [S, E]."""


def heat_of(run: RunRecord) -> Heat:
    """From the counts of rows if the run wrote them, else from what its metrics hold."""
    loads = {layer: over_mean(load_SE) for layer, load_SE in run.curve.loads.items()}
    busiest = {layer: load_SE.max(1) for layer, load_SE in loads.items()}
    prefix, suffix = "moe/", "/max_over_mean"
    for key, values in run.curve.scalars.items():
        if key.startswith(prefix) and key.endswith(suffix):
            busiest.setdefault(key[len(prefix) : -len(suffix)], values)
    return Heat(run.name, run.curve.steps, busiest, loads)


def load_maps(heats: Sequence[Heat], difference: Heat | None = None) -> str:
    """The busiest expert of each layer over time, and every expert's load layer by layer."""
    heats = [heat for heat in heats if heat.busiest]
    if not heats:
        return paragraph(
            "Unknown: neither rows per expert (metrics.log_expert_counts) nor moe/... were logged."
        )
    top = max(2.0, *(_high(values) for heat in heats for values in heat.busiest.values()))
    spread = _spread([] if difference is None else difference.busiest.values())
    columns = [(heat.name, heat.steps, _stack(heat.busiest), LOAD, top) for heat in heats]
    if difference is not None and difference.busiest:
        stacked = _stack(difference.busiest)
        columns.append((difference.name, difference.steps, stacked, DIFFERENCE, spread))
    label = ends(list(heats[0].busiest))
    scales = scale(LOAD, "0", f"{top:.1f} times the mean")
    if difference is not None:
        scales += scale(DIFFERENCE, f"{-spread:.2g}", f"+{spread:.2g} times the mean")
    shown = (
        paragraph("Rows of each layer's busiest expert over the mean of its experts; 1 is even.")
        + scales
        + grid([name for name, *_ in columns], [(label, [c[1:] for c in columns])])
    )
    return shown + _expert_maps(heats, difference)


def difference_of(baseline: RunRecord, candidate: RunRecord) -> Heat:
    """The candidate's loads minus the baseline's at the steps that both have."""
    first, second = heat_of(baseline), heat_of(candidate)
    common = common_steps(baseline.curve, candidate.curve)
    busiest = {
        layer: second.busiest[layer][common.second] - values[common.first]
        for layer, values in first.busiest.items()
        if layer in second.busiest
    }
    loads = {
        layer: second.loads[layer][common.second] - load_SE[common.first]
        for layer, load_SE in first.loads.items()
        if layer in second.loads and second.loads[layer].shape[1] == load_SE.shape[1]
    }
    return Heat("candidate - baseline", common.steps, busiest, loads)


def grid(
    heads: Sequence[str],
    rows: Sequence[tuple[str, Sequence[tuple[Sequence[int], Array, str, float]]]],
) -> str:
    """Maps side by side under their names: rows of (label as HTML, (steps, values [R, S], colours,
    the value at the end of the scale) for each column)."""
    cells = ["<span></span>", *(f"<b>{escape(head)}</b>" for head in heads)]
    for label, maps in rows:
        cells.append(label)
        cells += [image(values, colors, top) for _, values, colors, top in maps]
    cells.append("<small>step</small>")
    for steps, *_ in rows[0][1]:
        ends = f"<span>{steps[0]}</span><span>{steps[-1]}</span>" if len(steps) else ""
        cells.append(f"<div class=ends>{ends}</div>")
    return (
        f'<div class=narrow><div class=heat style="--columns: {len(heads)}">'
        f"{''.join(cells)}</div></div>"
    )


def ends(names: Sequence[str]) -> str:
    """The label of a map whose rows have these names."""
    if len(names) == 1:
        return f"<div><b>{escape(names[0])}</b></div>"
    return f"<div class=span><b>{escape(names[0])}</b><b>{escape(names[-1])}</b></div>"


def image(values_RS: Array, colors: str, top: float) -> str:
    """Rows from the top, one cell a step (of many, their mean); what is no number is empty."""
    cells = _binned(values_RS)
    known = np.nan_to_num(cells, nan=0.0, posinf=top, neginf=-top)
    if colors == DIFFERENCE:
        # Whatever differs is seen, however little.
        half = _LEVELS // 2
        at = half + np.sign(known) * np.ceil(np.abs(known) / top * half)
    else:
        at = known / top * _LEVELS
    level = np.clip(at, 0, _LEVELS - 1).astype(np.uint8)
    level[np.isnan(cells)] = _LEVELS
    height = int(min(max(10 * len(cells), 36), 256))
    return (
        f'<img style="height: {height}px" alt="{len(cells)} rows, {values_RS.shape[1]} steps" '
        f'src="{_png(level, colors)}">'
    )


def scale(colors: str, low: str, high: str) -> str:
    """What the colours mean."""
    source = _png(np.arange(_LEVELS, dtype=np.uint8)[None], colors)
    return f'<span class=scale>{escape(low)} <img alt="scale" src="{source}"> {escape(high)}</span>'


def _expert_maps(heats: Sequence[Heat], difference: Heat | None) -> str:
    """A row of maps for each layer, experts from top to bottom."""
    heats = [heat for heat in heats if heat.loads]
    if not heats:
        return paragraph("Single experts: unknown, for metrics.log_expert_counts was off.")
    layers = list(dict.fromkeys(layer for heat in heats for layer in heat.loads))
    experts = sum(heats[0].loads[layer].shape[1] for layer in heats[0].loads)
    many = experts > _MANY_EXPERTS
    if many:
        heats = heats[: 1 if difference is not None else _MOST_RUNS]
    top = max(2.0, *(_high(load) for heat in heats for load in heat.loads.values()))
    spread = _spread([] if difference is None else difference.loads.values())
    drawn = [(heat, LOAD, top) for heat in heats]
    if difference is not None and difference.loads:
        drawn.append((difference, DIFFERENCE, spread))
    rows = []
    for layer in layers:
        maps = [
            (heat.steps, heat.loads[layer].T if layer in heat.loads else _nothing(heat), kind, end)
            for heat, kind, end in drawn
        ]
        last = maps[0][1].shape[0] - 1
        label = f"<div><b>{escape(layer)}</b><small>experts 0 to {last}</small></div>"
        rows.append((label, maps))
    scales = scale(LOAD, "0", f"{top:.1f} times the mean")
    if difference is not None:
        scales += scale(DIFFERENCE, f"{-spread:.2g}", f"+{spread:.2g} times the mean")
    body = scales + grid([heat.name for heat, *_ in drawn], rows)
    return folded(
        f"Every expert: {len(layers)} layers, {experts} experts in all, expert 0 on top",
        body,
        is_open=not many,
    )


def _nothing(heat: Heat) -> Array:
    return np.full((1, len(heat.steps)), np.nan)


def _stack(by_layer: Mapping[str, Array]) -> Array:
    return np.stack(list(by_layer.values()))


def _high(values: Array) -> float:
    """The end of a scale: a few larger values may be cut off."""
    known = values[np.isfinite(values)]
    return float(np.quantile(known, 0.998)) if known.size else 0.0


def _spread(differences) -> float:  # type: ignore[no-untyped-def]
    return max([1e-3, *(_high(np.abs(values)) for values in differences)])


def _binned(values_RS: Array) -> Array:
    parts = np.array_split(np.arange(values_RS.shape[1]), min(values_RS.shape[1], _MOST_COLUMNS))
    columns = [values_RS[:, part].mean(1) for part in parts if len(part)]
    return np.stack(columns, 1) if columns else np.full((len(values_RS), 1), np.nan)


def _png(level: np.ndarray, colors: str) -> str:
    """A data: address."""
    # Imported here, as matplotlib is, which brings it.
    from PIL import Image

    picture = Image.fromarray(level)
    found = (np.array(shades(colors)(np.arange(_LEVELS))) * 255).round().astype(np.uint8)
    # One more, which is not seen.
    found = np.concatenate([found, np.zeros((1, 4), np.uint8)])
    picture.putpalette(found[:, :3].tobytes())
    written = io.BytesIO()
    picture.save(written, "PNG", bits=4, transparency=found[:, 3].tobytes(), optimize=True)
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def shades(colors: str) -> "ListedColormap":
    """The colours of a map; differences fade to nothing, so that they suit both schemes."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    if colors == DIFFERENCE:
        half = _LEVELS // 2
        sides = [_BLUE if i < half else _ORANGE for i in range(_LEVELS)]
        opacity = [abs(i - half) / half for i in range(_LEVELS)]
        found = [[*(c / 255 for c in side), a] for side, a in zip(sides, opacity, strict=True)]
        return ListedColormap(found)
    return ListedColormap(colormaps["viridis"](np.linspace(0, 1, _LEVELS)))
