"""How far each place of a step differs between two captures, and how far rounding may."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_moe.verify.localize.capture.records import PHASES, Place
from titan_moe.verify.localize.capture_reader import Array, Capture, CapturedTensor, Ints

BOUNDS = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
"""The bound of rounding for each compute type, where no control run says more: relative
to the token's, the expert's or the tensor's norm."""
_CALIBRATED = {"float16": 2e-3, "bfloat16": 1e-2}
"""The same where a control run computed in a wider type, which shows all that rounding does."""
_WEAK = {"float64": 1e-3}
"""A value weaker than this share of the place's others is measured as if it had that share; in low
precision, every one is measured by the others."""
_CONTROL_FACTOR, _OF_NUMBERS = 8.0, 32.0
"""On what a control run differs by; of single numbers, where controls may agree by chance."""
_UPDATES = {"float64": 1e-6, "float32": 1e-2, "float16": 0.1, "bfloat16": 0.3}
"""The same of what AdamW adds: where a gradient is next to nothing, rounding chooses its sign."""
_STORED = {"float64": 1e-14}
"""Share of a parameter that its update cannot resolve; 1e-6 where it is kept in float32."""
_EXACT = {"data": 0.0, "counts": 0.0, "start": 1e-12}
_EXACT_TENSORS = {"choice": 0.0, "num_targets": 0.0}


class PlaceDifference(NamedTuple):
    """How far a place is from itself in the other capture."""

    place: Place
    error: float
    """The largest of any key: ||candidate - baseline|| over the larger norm."""
    bound: float
    keys: Ints
    """[N, 2], those beyond the bound."""
    norms: tuple[float, float]
    """Over those keys: of the baseline, of the candidate."""
    distance: float
    """Over those keys: ||candidate - baseline||, estimated."""
    keys_are: str
    whole: bool
    """True if these are all keys of the place."""
    ranks: tuple[int, int] | None = None
    """Two ranks of the candidate that hold different copies of one value."""
    missing: bool = False
    """The candidate has nothing here, which is taken for zeros."""

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
    """Compares every place that both have, in causal order."""
    dtype = max(
        (str(each.facts["compute_dtype"]) for each in (baseline, candidate)),
        key=lambda name: BOUNDS[name],
    )
    weak, found = _WEAK.get(dtype, 1.0), _recomputed(candidate, dtype)
    calibrated = any(BOUNDS[str(each.facts["compute_dtype"])] < BOUNDS[dtype] for each in controls)
    for place, ours in baseline.places.items():
        if place.phase == "recompute":
            continue
        bound = _bound(place, dtype, calibrated=calibrated)
        if place.phase == "update":
            bound = max(bound, _STORED.get(dtype, 1e-6) * _size_of_parameter(baseline, ours))
        for other in controls:
            if bound and place in other.places:
                error = _compare(ours, other.places[place], weak, bound).error
                factor = _OF_NUMBERS if ours.keys_are == "numbers" else _CONTROL_FACTOR
                if np.isfinite(error):  # A control run with NaN does not make NaN right.
                    bound = max(bound, factor * error)
        theirs = candidate.places.get(place)
        if theirs is None:
            if place.phase == "backward":
                found.append(_compare(ours, _zeros(ours), weak, bound)._replace(missing=True))
            continue
        difference = _compare(ours, theirs, weak, bound)
        if (apart := _apart(theirs, weak, bound)) is not None:
            beyond = difference.error > bound
            difference = difference._replace(ranks=apart.ranks) if beyond else apart
        found.append(difference)
    return sorted(found, key=lambda each: list(PHASES).index(each.place.phase))


def _size_of_parameter(captured: Capture, update: CapturedTensor) -> float:
    """The norm of a parameter over that of its update."""
    last = update.place.tensor.removeprefix("update of ")
    whole = captured.places[Place("start", update.place.module, last)]
    largest = norms_of(update.values, False).max()
    return float(norms_of(whole.values, True).max() / largest) if largest else 0.0


def _recomputed(candidate: Capture, dtype: str) -> list[PlaceDifference]:
    """Compares the candidate's recomputation with its own forward."""
    found = []
    for place, again in candidate.places.items():
        if place.phase == "recompute":
            first = replace(candidate.places[place._replace(phase="forward")], place=place)
            found.append(_compare(first, again, _WEAK.get(dtype, 1.0), BOUNDS[dtype]))
    return found


def _bound(place: Place, dtype: str, *, calibrated: bool) -> float:
    if place.tensor in _EXACT_TENSORS:
        return _EXACT_TENSORS[place.tensor]
    if place.phase == "update":
        return _UPDATES[dtype]
    usual = _CALIBRATED.get(dtype, BOUNDS[dtype]) if calibrated else BOUNDS[dtype]
    return _EXACT.get(place.phase, usual)


def _compare(
    ours: CapturedTensor, theirs: CapturedTensor, weak: float, bound: float
) -> PlaceDifference:
    """Compares key by key; a key that one capture lacks counts as zeros there."""
    keys, (a, b) = _aligned(ours, theirs)
    return _difference(ours, keys, a, b, weak, bound, exact=ours.exact and theirs.exact)[0]


def _apart(whole: CapturedTensor, weak: float, bound: float) -> PlaceDifference | None:
    """Returns the difference between ranks' copies of one value; None if they agree."""
    copies = whole.copies
    found, wrong = _difference(
        whole, copies.keys, copies.first, copies.other, weak, bound, exact=whole.exact
    )
    if not wrong.any():
        return None
    first, other = copies.ranks[wrong][0].tolist()
    keys = np.unique(found.keys, axis=0)
    return found._replace(keys=keys, whole=len(keys) == len(whole.keys), ranks=(first, other))


def _difference(
    whole: CapturedTensor,
    keys: Ints,
    a: Array,
    b: Array,
    weak: float,
    bound: float,
    *,
    exact: bool,
) -> tuple[PlaceDifference, NDArray[np.bool_]]:
    """Compares two lists of values of one place; also returns which are beyond the bound."""
    a_norms, b_norms = norms_of(a, exact), norms_of(b, exact)
    far = _far(a, b)
    errors = _errors(far, a_norms, b_norms, weak)
    wrong = errors > bound
    difference = PlaceDifference(
        place=whole.place,
        error=float(errors.max(initial=0.0)),
        bound=bound,
        keys=keys[wrong],
        norms=(_total(a_norms[wrong]), _total(b_norms[wrong])),
        distance=_total(far[wrong]),
        keys_are=whole.keys_are,
        whole=bool(wrong.all()),
    )
    return difference, wrong


def _far(a: Array, b: Array) -> Array:
    """The distance of each key, by what is linear in the tensors."""
    first = 0 if a.shape[1] == 1 else 1
    return np.sqrt(np.square(b[:, first:] - a[:, first:]).mean(1))


def _errors(far: Array, a_norms: Array, b_norms: Array, weak: float) -> Array:
    """The distance of each key over the larger norm; NaN is infinitely far."""
    norms = np.maximum(a_norms, b_norms)
    usual = np.sqrt(np.square(norms).mean()) if len(norms) else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.where(far == 0, 0.0, far / np.maximum(norms, weak * usual))
    return np.where(np.isnan(errors), np.inf, errors)


def norms_of(values: Array, exact: bool) -> Array:
    if values.shape[1] == 1:
        return np.abs(values[:, 0])
    if exact:
        return np.sqrt(values[:, 0])
    return np.sqrt(np.square(values[:, 1:]).mean(1))


def _total(norms: Array) -> float:
    return float(np.sqrt(np.square(norms).sum()))


def _aligned(ours: CapturedTensor, theirs: CapturedTensor) -> tuple[Ints, list[Array]]:
    """Returns the values of both captures at all keys of either."""
    if np.array_equal(ours.keys, theirs.keys):
        return ours.keys, [ours.values, theirs.values]
    keys, where = np.unique(np.concatenate([ours.keys, theirs.keys]), axis=0, return_inverse=True)
    sides = []
    for side, places in zip((ours, theirs), np.split(where.ravel(), [len(ours.keys)]), strict=True):
        values = np.zeros((len(keys), side.values.shape[1]))
        values[places] = side.values
        sides.append(values)
    return keys, sides


def _zeros(whole: CapturedTensor) -> CapturedTensor:
    return replace(whole, values=np.zeros_like(whole.values))
