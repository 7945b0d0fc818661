"""Heat maps of expert load: rows by name and number, steps from left to right.

Pages embed them as images, the picture draws them with matplotlib: both from the same levels, so
that a colour means the same number in both.
"""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from titan_moe.verify.compare.records import Array, RunRecord
from titan_moe.verify.report.data import common_steps, over_mean

if TYPE_CHECKING:
    from matplotlib.colors import ListedColormap

LOAD, DIFFERENCE = "load", "difference"
"""The colours of a map: from 0 up, or to both sides of 0."""
LEVELS = 15
"""Colours of a map; one more stands for NaN. 16 fit into 4 bits."""
_MOST_COLUMNS = 100
_MANY_EXPERTS = 256
"""Maps of more experts in all layers are folded, and the candidate's own is left out."""
_MOST_RUNS = 4
"""Runs of many experts whose maps are drawn: each is a megabyte."""
_LEAST_LOAD, _LEAST_DIFFERENCE = 2.0, 1e-3
"""Ends of a scale are at least this."""
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
    colors: str = LOAD


def heat_of(run: RunRecord) -> Heat:
    """From the counts of rows if the run wrote them, else from what its metrics hold."""
    loads = {layer: over_mean(load_SE) for layer, load_SE in run.curve.loads.items()}
    busiest = {layer: load_SE.max(1) for layer, load_SE in loads.items()}
    prefix, suffix = "moe/", "/max_over_mean"
    for key, values in run.curve.scalars.items():
        if key.startswith(prefix) and key.endswith(suffix):
            busiest.setdefault(key[len(prefix) : -len(suffix)], values)
    return Heat(run.name, run.curve.steps, busiest, loads)


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
    return Heat("candidate - baseline", common.steps, busiest, loads, DIFFERENCE)


def scale_end(maps: Iterable[Array], colors: str) -> float:
    """The number at the end of a scale for all of these maps; a few larger ones are cut off."""
    least = _LEAST_LOAD if colors == LOAD else _LEAST_DIFFERENCE
    return max([least, *(_high(np.abs(values)) for values in maps)])


def levels(values_RS: Array, colors: str, end: float) -> NDArray[np.uint8]:
    """The colour of each cell, [R, columns]: one column a step (of many, their mean); LEVELS where
    the value is NaN."""
    cells = _binned(values_RS)
    known = np.nan_to_num(cells, nan=0.0, posinf=end, neginf=-end)
    if colors == DIFFERENCE:
        # Every difference is seen, however small.
        half = LEVELS // 2
        at = half + np.sign(known) * np.ceil(np.abs(known) / end * half)
    else:
        at = known / end * LEVELS
    level = np.clip(at, 0, LEVELS - 1).astype(np.uint8)
    level[np.isnan(cells)] = LEVELS
    return level


def shades(colors: str) -> "ListedColormap":
    """The colours of a map; differences fade to transparent, so that they suit both schemes."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    if colors == DIFFERENCE:
        half = LEVELS // 2
        sides = [_BLUE if i < half else _ORANGE for i in range(LEVELS)]
        opacity = [abs(i - half) / half for i in range(LEVELS)]
        found = [[*(c / 255 for c in side), a] for side, a in zip(sides, opacity, strict=True)]
        return ListedColormap(found)
    return ListedColormap(colormaps["viridis"](np.linspace(0, 1, LEVELS)))


def load_maps(heats: Sequence[Heat], difference: Heat | None = None) -> dict[str, Any]:
    """For the `expert_load` macro: the busiest expert of each layer over time, and every expert's
    load layer by layer."""
    heats = [heat for heat in heats if heat.busiest]
    if not heats:
        unknown = "neither rows per expert (metrics.log_expert_counts) nor moe/... were logged"
        return {"lines": [f"Unknown: {unknown}."], "busiest": None, "experts": None}
    drawn = [*heats, *([difference] if difference is not None and difference.busiest else [])]
    ends = _ends(drawn, lambda heat: heat.busiest.values())
    maps = [
        _map(np.stack(list(heat.busiest.values())), heat.colors, ends[heat.colors])
        for heat in drawn
    ]
    row = {"names": list(heats[0].busiest), "note": "", "maps": maps}
    found: dict[str, Any] = {"lines": [], "busiest": _grid(drawn, [row], ends), "experts": None}
    return found | _expert_maps(heats, difference)


def share_map(head: str, names: Sequence[str], steps: Sequence[int], share_SL: Array) -> Any:
    """For the `heat_grid` macro: one map of shares; None if all are 0."""
    end = float(np.nanmax(share_SL, initial=0.0))
    if not end > 0:
        return None
    row = {"names": names, "note": "", "maps": [_map(share_SL.T, LOAD, end)]}
    grid = _grid([Heat(head, steps, {}, {})], [row], {LOAD: end})
    return grid | {"scales": [_scale(LOAD, "0", f"{end:.2%}")]}


def _expert_maps(heats: Sequence[Heat], difference: Heat | None) -> dict[str, Any]:
    """A row of maps for each layer, experts from top to bottom."""
    heats = [heat for heat in heats if heat.loads]
    if not heats:
        return {"lines": ["Single experts: unknown, for metrics.log_expert_counts was off."]}
    layers = list(dict.fromkeys(layer for heat in heats for layer in heat.loads))
    experts = sum(heats[0].loads[layer].shape[1] for layer in heats[0].loads)
    many = experts > _MANY_EXPERTS
    every = [*heats, *([difference] if difference is not None and difference.loads else [])]
    ends = _ends(every, lambda heat: heat.loads.values())
    if many:
        heats = heats[: 1 if difference is not None else _MOST_RUNS]
    drawn = [*heats, *(heat for heat in every if heat.colors == DIFFERENCE)]
    rows = []
    for layer in layers:
        maps = [heat.loads[layer].T if layer in heat.loads else _nothing(heat) for heat in drawn]
        images = [
            _map(values, heat.colors, ends[heat.colors])
            for heat, values in zip(drawn, maps, strict=True)
        ]
        note = f"experts 0 to {maps[0].shape[0] - 1}"
        rows.append({"names": [layer], "note": note, "maps": images})
    title = f"Every expert: {len(layers)} layers, {experts} experts in all, expert 0 on top"
    grid = _grid(drawn, rows, ends)
    return {"experts": grid, "experts_title": title, "experts_open": not many}


def _ends(heats: Sequence[Heat], maps_of: Any) -> dict[str, float]:
    return {
        colors: scale_end((v for h in heats if h.colors == colors for v in maps_of(h)), colors)
        for colors in dict.fromkeys(heat.colors for heat in heats)
    }


def _grid(
    heats: Sequence[Heat], rows: list[dict[str, Any]], ends: Mapping[str, float]
) -> dict[str, Any]:
    words = {LOAD: ("0", "{:.1f}"), DIFFERENCE: ("-{:.2g}", "+{:.2g}")}
    scales = [
        _scale(
            colors, words[colors][0].format(end), f"{words[colors][1].format(end)} times the mean"
        )
        for colors, end in ends.items()
    ]
    steps = [(heat.steps[0], heat.steps[-1]) if len(heat.steps) else () for heat in heats]
    return {"heads": [heat.name for heat in heats], "rows": rows, "steps": steps, "scales": scales}


def _map(values_RS: Array, colors: str, end: float) -> dict[str, Any]:
    level = levels(values_RS, colors, end)
    return {
        "height": int(min(max(10 * len(level), 36), 256)),
        "text": f"{len(level)} rows, {values_RS.shape[1]} steps",
        "image": _png(level, colors),
    }


def _scale(colors: str, low: str, high: str) -> dict[str, str]:
    image = _png(np.arange(LEVELS, dtype=np.uint8)[None], colors)
    return {"low": low, "high": high, "image": image}


def _nothing(heat: Heat) -> Array:
    return np.full((1, len(heat.steps)), np.nan)


def _high(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, 0.998)) if known.size else 0.0


def _binned(values_RS: Array) -> Array:
    parts = np.array_split(np.arange(values_RS.shape[1]), min(values_RS.shape[1], _MOST_COLUMNS))
    columns = [values_RS[:, part].mean(1) for part in parts if len(part)]
    return np.stack(columns, 1) if columns else np.full((len(values_RS), 1), np.nan)


def _png(level: NDArray[np.uint8], colors: str) -> str:
    """A data: address."""
    # Imported here, as matplotlib is, which requires it.
    from PIL import Image

    picture = Image.fromarray(level)
    found = (np.array(shades(colors)(np.arange(LEVELS))) * 255).round().astype(np.uint8)
    # One more, which is transparent.
    found = np.concatenate([found, np.zeros((1, 4), np.uint8)])
    picture.putpalette(found[:, :3].tobytes())
    written = io.BytesIO()
    picture.save(written, "PNG", bits=4, transparency=found[:, 3].tobytes(), optimize=True)
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
