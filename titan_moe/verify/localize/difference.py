"""Measures how far each place of a step differs between two captures, and how far rounding may."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from titan_moe.training.capture.records import PHASES, Place
from titan_moe.verify.localize.capture_reader import Array, Capture, CapturedTensor, Ints, norms


class Rounding(NamedTuple):
    """Bounds what rounding may do if the control runs show less, relative to the norm of a token,
    an expert or a tensor."""

    bound: float
    calibrated: float
    """The bound where a control run computed in a wider type, which shows all that rounding does.
    """
    update: float
    """The bound of what AdamW adds: rounding chooses its sign where a gradient is next to nothing.
    """
    stored: float
    """Share of a parameter that its update cannot resolve."""
    weak: float
    """A value weaker than this share of the place's others is measured as if it had that share; in
    low precision, every one is measured by the others."""


ROUNDING = {
    "float64": Rounding(1e-9, 1e-9, update=1e-6, stored=1e-14, weak=1e-3),
    "float32": Rounding(1e-4, 1e-4, update=1e-2, stored=1e-6, weak=1.0),
    "float16": Rounding(2e-2, 2e-3, update=0.1, stored=1e-6, weak=1.0),
    "bfloat16": Rounding(6e-2, 1e-2, update=0.3, stored=1e-6, weak=1.0),
}
"""Least bounds, by the type of activations."""
_EXACT = {"data": 0.0, "counts": 0.0, "start": 1e-12, "choice": 0.0, "num_targets": 0.0}
"""Bounds of phases and of tensors that rounding hardly reaches."""
_CONTROL_FACTOR, _OF_NUMBERS = 8.0, 32.0
"""Factors on a control run's difference. That of single numbers is larger: controls may agree by
chance."""


class PlaceDifference(NamedTuple):
    """The difference of one place between two captures."""

    place: Place
    error: float
    """The largest of any key: ||candidate - baseline|| over the larger norm."""
    bound: float
    kind: str
    keys: Ints
    """[N], those beyond the bound."""
    norms: tuple[float, float]
    """Over those keys: of the baseline, of the candidate; estimated, as is the distance."""
    distance: float
    """Over those keys: ||candidate - baseline||."""
    whole: bool
    """True if these are all keys of the place."""
    copies: bool
    """True if ranks of the candidate hold different copies of one value."""

    @property
    def ratio(self) -> float:
        """The candidate's norm over the baseline's."""
        ours, theirs = self.norms[1], self.norms[0]
        return 1.0 if ours == theirs else ours / theirs if theirs else np.inf

    @property
    def off_by(self) -> float:
        """The distance over the larger norm."""
        return self.distance / max(*self.norms, 1e-300)


def differences(
    baseline: Capture, candidate: Capture, controls: Sequence[Capture] = ()
) -> list[PlaceDifference]:
    """Compares every place that both have, in causal order, and the candidate's recomputation with
    its own forward. A gradient that the candidate lacks is taken for zeros."""
    roundings = [ROUNDING[each.facts["compute_dtype"]] for each in (baseline, candidate)]
    rounding, found = max(roundings), []
    for place, again in candidate.places.items():
        if place.phase == "recompute" and place.tensor != "margin":
            first = candidate.places[place._replace(phase="forward")]
            found.append(_compare(place, first, again, rounding.weak, rounding.bound))
    for place, ours in baseline.places.items():
        theirs = candidate.places.get(place)
        if theirs is None and place.phase == "backward":
            theirs = replace(ours, keys=ours.keys[:0], values=ours.values[:0], apart=ours.apart[:0])
        if theirs is None or place.phase == "recompute" or place.tensor == "margin":
            continue
        bound = _bound(place, baseline, controls, rounding)
        found.append(_compare(place, ours, theirs, rounding.weak, bound))
    return sorted(found, key=lambda each: list(PHASES).index(each.place.phase))


def _bound(
    place: Place, baseline: Capture, controls: Sequence[Capture], rounding: Rounding
) -> float:
    ours = baseline.places[place]
    wider = any(ROUNDING[each.facts["compute_dtype"]] < rounding for each in controls)
    bound = rounding.calibrated if wider else rounding.bound
    bound = _EXACT.get(place.tensor, _EXACT.get(place.phase, bound))
    if place.phase == "update":
        last = place.tensor.removeprefix("update of ")
        before = norms(baseline.places[Place("start", place.module, last)].values).max()
        added = norms(ours.values).max()
        bound = max(rounding.update, rounding.stored * before / added if added else 0.0)
    factor = _OF_NUMBERS if ours.kind == "numbers" else _CONTROL_FACTOR
    for other in controls:
        if bound and (theirs := other.places.get(place)) is not None:
            whole = replace(theirs, apart=np.zeros_like(theirs.apart))  # Copies are to be equal.
            error = _compare(place, ours, whole, rounding.weak, bound).error
            if np.isfinite(error):  # A control run with NaN does not make NaN right.
                bound = max(bound, factor * error)
    return bound


def _compare(
    place: Place, ours: CapturedTensor, theirs: CapturedTensor, weak: float, bound: float
) -> PlaceDifference:
    """Compares key by key; a key that one capture lacks counts as zeros there."""
    keys = np.union1d(ours.keys, theirs.keys)
    a, b = _at(keys, ours.keys, ours.values), _at(keys, theirs.keys, theirs.values)
    apart = _at(keys, theirs.keys, theirs.apart)
    larger = np.maximum(norms(a), norms(b))
    far = norms(b - a)
    errors, copies = _errors(far, larger, weak), _errors(apart, larger, weak)
    wrong = np.maximum(errors, copies) > bound
    return PlaceDifference(
        place=place,
        error=float(np.maximum(errors, copies).max(initial=0.0)),
        bound=bound,
        kind=ours.kind,
        keys=keys[wrong],
        norms=(_total(norms(a)[wrong]), _total(norms(b)[wrong])),
        distance=_total(np.maximum(far, apart)[wrong]),
        whole=bool(wrong.all()),
        copies=bool((copies > bound).any()),
    )


def _at(keys: Ints, own: Ints, values: Array) -> Array:
    """Returns the values at these keys, zeros where there is none."""
    found = np.zeros((len(keys), *values.shape[1:]))
    found[np.searchsorted(keys, own)] = values
    return found


def _errors(far: Array, larger: Array, weak: float) -> Array:
    """The distance of each key over the larger norm; NaN is infinitely far."""
    usual = _total(larger) / np.sqrt(max(len(larger), 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.where(far == 0, 0.0, far / np.maximum(larger, weak * usual))
    return np.where(np.isnan(errors), np.inf, errors)


def _total(norms: Array) -> float:
    return float(np.sqrt(np.square(norms).sum()))
