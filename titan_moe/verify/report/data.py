"""The numbers behind the charts and tables of a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan_moe.verify.compare.comparison import Comparison
from titan_moe.verify.compare.records import (
    BUSIEST,
    LOAD_OF,
    Array,
    RunRecord,
    moved_share,
    relative_difference,
)

_MOST_ROWS = 300
"""Experts of all layers in one heat map; above, only the busiest of each layer are drawn."""
# Quantities that follow from others, or differ from machine to machine.
_NOT_COMPARED = ("lr", "moe/", "tokens_per_second")


@dataclass(frozen=True)
class Deviation:
    """The distance of the candidate's quantity at its worst step."""

    quantity: str
    step: int
    baseline: float
    candidate: float
    """NaN for loads, which are many numbers."""
    relative: float
    """|candidate - baseline| / |baseline|; for a load, the share of rows at other experts."""
    reach: float
    """Distance from the band's middle in half widths of the band, each step alone; above 1 is
    outside. NaN without a band."""
    steps_outside: int


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
    curve = run.curve
    layers = {
        name: (load_SE / np.maximum(load_SE.mean(1, keepdims=True), 1e-9)).T
        for name, load_SE in curve.loads.items()
    }
    if layers and sum(map(len, layers.values())) <= _MOST_ROWS:
        return Load(run.name, "expert load", curve.steps, layers)
    busiest = {name: rows_ES.max(0, keepdims=True) for name, rows_ES in layers.items()}
    for key, values in curve.scalars.items():
        if key.endswith(BUSIEST):
            busiest.setdefault(key.removeprefix("moe/").removesuffix(BUSIEST), values[None])
    return Load(run.name, "busiest experts", curve.steps, busiest)


def load_difference(baseline: RunRecord, candidate: RunRecord) -> Load:
    """The candidate's loads minus the baseline's."""
    first, second = load_of(baseline), load_of(candidate)
    layers = {
        name: second.layers[name] - rows_RS
        for name, rows_RS in first.layers.items()
        if name in second.layers and second.layers[name].shape == rows_RS.shape
    }
    return Load("candidate - baseline", first.kind, first.steps, layers, signed=True)


def deviations(comparison: Comparison) -> list[Deviation]:
    """Every quantity that both runs have, the one furthest out first."""
    first, second = comparison.baseline.curve, comparison.candidate.curve
    reaches = {} if comparison.band is None else comparison.band.reaches(second)
    nothing_S = np.full(len(first.steps), np.nan)
    pairs = {
        key: (ours_S, second.scalars[key], relative_difference(ours_S, second.scalars[key]))
        for key, ours_S in first.scalars.items()
        if not key.startswith(_NOT_COMPARED) and key in second.scalars
    }
    for layer, ours_SE in first.loads.items():
        theirs_SE = second.loads.get(layer)
        if theirs_SE is not None and theirs_SE.shape == ours_SE.shape:
            pairs[LOAD_OF + layer] = nothing_S, nothing_S, moved_share(ours_SE, theirs_SE)
    found = []
    for key, numbers in pairs.items():
        reach_S = reaches.get(key, nothing_S)
        # The step that is furthest out of the band, or, without one, differs most.
        furthest_S = reach_S if key in reaches else numbers[-1]
        at = int(np.nan_to_num(furthest_S, nan=-1.0).argmax())
        ours, theirs, relative, reach = (float(each_S[at]) for each_S in (*numbers, reach_S))
        outside = int((reach_S > 1).sum())
        found.append(Deviation(key, first.steps[at], ours, theirs, relative, reach, outside))
    return sorted(found, key=lambda one: tuple(-np.nan_to_num([one.reach, one.relative])))
