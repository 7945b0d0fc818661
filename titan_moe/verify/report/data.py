"""The numbers behind the charts and tables of a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_moe.verify.compare.comparison import Comparison
from titan_moe.verify.compare.records import LOAD_OF, NORM_OF, Array, Curve, RunRecord

MOST_POINTS = 1500
"""More points than a chart has pixels make a page heavy and no clearer."""
_MOST_ROWS = 300
"""Experts of all layers in one heat map; above, only the busiest of each layer are drawn."""
_LEAST_NORM = 1e-4
# Quantities that follow from others, or differ from machine to machine.
_NOT_COMPARED = ("lr", "moe/", "tokens_per_second")


class Common(NamedTuple):
    """The steps that two curves share, and where each has them."""

    steps: list[int]
    first: NDArray[np.int64]
    second: NDArray[np.int64]


@dataclass(frozen=True)
class Deviation:
    """The distance of the candidate's quantity at its worst step."""

    quantity: str
    step: int
    baseline: float
    candidate: float
    """NaN for loads, which are many numbers."""
    relative: float
    """|candidate - baseline| / |baseline|; for a load, the share of rows at other experts. A
    parameter's norm far below the total norm counts as that much."""
    reach: float | None
    """Distance from the band's middle in half widths of the band, each step alone; above 1 is
    outside. None without a band."""
    steps_outside: int | None


@dataclass(frozen=True)
class Load:
    """The expert load of a run, or the difference of two."""

    name: str
    kind: str
    """"expert load", or "busiest experts" where single experts are too many or not logged."""
    steps: Sequence[int]
    layers: Mapping[str, Array]
    """By MoE layer, rows over the mean of the layer's experts: [experts, S] or [1, S]."""
    signed: bool = False


def load_of(run: RunRecord) -> Load:
    """Expert load from the counts of rows if the run wrote them, else from its metrics."""
    curve = run.curve
    layers = {name: over_mean(load_SE).T for name, load_SE in curve.loads.items()}
    if layers and sum(map(len, layers.values())) <= _MOST_ROWS:
        return Load(run.name, "expert load", curve.steps, layers)
    busiest = {name: rows_ES.max(0, keepdims=True) for name, rows_ES in layers.items()}
    prefix, suffix = "moe/", "/max_over_mean"
    for key, values in curve.scalars.items():
        if key.startswith(prefix) and key.endswith(suffix):
            busiest.setdefault(key[len(prefix) : -len(suffix)], values[None])
    return Load(run.name, "busiest experts", curve.steps, busiest)


def load_difference(baseline: RunRecord, candidate: RunRecord) -> Load:
    """The candidate's loads minus the baseline's at the steps that both have."""
    first, second = load_of(baseline), load_of(candidate)
    common = common_steps(baseline.curve, candidate.curve)
    layers = {
        name: second.layers[name][:, common.second] - rows_RS[:, common.first]
        for name, rows_RS in first.layers.items()
        if name in second.layers and len(second.layers[name]) == len(rows_RS)
    }
    return Load("candidate - baseline", first.kind, common.steps, layers, signed=True)


def common_steps(first: Curve, second: Curve) -> Common:
    """The shared steps in ascending order; none, if the curves share none."""
    places = {step: i for i, step in enumerate(second.steps)}
    pairs = [(step, i, places[step]) for i, step in enumerate(first.steps) if step in places]
    columns = np.array(pairs, dtype=np.int64).reshape(-1, 3).T
    return Common(columns[0].tolist(), columns[1], columns[2])


def relative_difference(first: Array, second: Array) -> Array:
    """|second - first| / |first|, 0 where both are equal, infinite where one of them is not
    finite, NaN where both are not."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.abs(second - first) / np.abs(first)
    found[first == second] = 0.0
    finite = np.isfinite(first), np.isfinite(second)
    found[finite[0] ^ finite[1]] = np.inf
    found[~finite[0] & ~finite[1]] = np.nan
    return found


def equal_steps(comparison: Comparison, quantity: str) -> int:
    """The number of common steps if the quantity is the same in all of them and there is no band to
    draw either; otherwise 0."""
    first, second = comparison.baseline.curve, comparison.candidate.curve
    common = common_steps(first, second)
    if comparison.band is not None or not (
        quantity in first.scalars and quantity in second.scalars
    ):
        return 0
    ours, theirs = first.scalars[quantity][common.first], second.scalars[quantity][common.second]
    return len(common.steps) if np.array_equal(ours, theirs) else 0


def moved_share(first_SE: Array, second_SE: Array) -> Array:
    """The share of rows that went to other experts, [S], if expert's rows are the same."""
    total_S = np.maximum(first_SE.sum(1), 1.0)
    return np.abs(second_SE - first_SE).sum(1) / (2 * total_S)


def over_mean(load_SE: Array) -> Array:
    """Rows of each expert over the step's mean of all experts; 0 in a step without rows."""
    mean_S = load_SE.mean(1, keepdims=True)
    return np.divide(load_SE, mean_S, out=np.zeros_like(load_SE, dtype=float), where=mean_S > 0)


def thinned(steps: Sequence[int] | Array, values: Array) -> tuple[Array, Array]:
    """At most about MOST_POINTS points: of each stretch of steps the least and the largest, and the
    first that is not finite."""
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    if len(x) <= MOST_POINTS:
        return x, y
    kept: set[int] = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), MOST_POINTS // 2):
        here = part[np.isfinite(y[part])]
        if len(here):
            kept |= {int(here[y[here].argmin()]), int(here[y[here].argmax()])}
        if len(here) < len(part):
            kept.add(int(part[~np.isfinite(y[part])][0]))
    places = sorted(kept)
    return x[places], y[places]


def deviations(comparison: Comparison) -> list[Deviation]:
    """Every quantity that both runs have, the one furthest out first."""
    first, second = comparison.baseline.curve, comparison.candidate.curve
    common = common_steps(first, second)
    if not common.steps:
        return []
    band, reaches = comparison.band, {}
    if band is not None and list(second.steps) == list(band.steps):
        reaches = band.reaches(second)
    totals = _total_norm(first), _total_norm(second)
    nothing = np.full(len(common.steps), np.nan)
    found = []

    def add(key: str, values: tuple[Array, Array], relative: Array) -> None:
        reach = None if key not in reaches else reaches[key][common.second]
        found.append(_deviation(key, common.steps, values, relative, reach))

    for key in first.scalars:
        if not key.startswith(_NOT_COMPARED) and key in second.scalars:
            ours, theirs = (
                first.scalars[key][common.first],
                second.scalars[key][common.second],
            )
            floored = (
                _floored(first, key, totals[0])[common.first],
                _floored(second, key, totals[1])[common.second],
            )
            add(key, (ours, theirs), relative_difference(*floored))
    for layer, ours_SE in first.loads.items():
        theirs_SE = second.loads.get(layer)
        if theirs_SE is not None and theirs_SE.shape[1:] == ours_SE.shape[1:]:
            moved = moved_share(ours_SE[common.first], theirs_SE[common.second])
            add(LOAD_OF + layer, (nothing, nothing), moved)
    return sorted(found, key=lambda one: (-(one.reach or 0.0), -np.nan_to_num(one.relative)))


def _deviation(
    key: str,
    steps: list[int],
    values: tuple[Array, Array],
    relative: Array,
    reach: Array | None,
) -> Deviation:
    """The deviation at the step that is furthest out of the band, or, without one, differs most."""
    measure = np.nan_to_num(relative, nan=-1.0) if reach is None else reach
    at = int(measure.argmax())
    ours, theirs = float(values[0][at]), float(values[1][at])
    if reach is None:
        return Deviation(key, steps[at], ours, theirs, float(relative[at]), None, None)
    outside = int((reach > 1).sum())
    return Deviation(key, steps[at], ours, theirs, float(relative[at]), float(reach.max()), outside)


def _floored(curve: Curve, key: str, total_S: Array) -> Array:
    """A parameter's norm, or any other scalar; far below the total, norms are noise."""
    values = curve.scalars[key]
    if not key.startswith(NORM_OF):
        return values
    return np.maximum(values, _LEAST_NORM * total_S)


def _total_norm(curve: Curve) -> Array:
    """The norm of all parameters whose norms are known, [S]."""
    squares = [v**2 for key, v in curve.scalars.items() if key.startswith(NORM_OF)]
    return np.sqrt(np.sum(squares, 0)) if squares else np.zeros(len(curve.steps))
