"""Where two runs part: the first place of a step, in causal order, that differs beyond rounding.

Two captures are read in the order in which a step makes one thing from the other: the rows, the
parameters at its start, what modules return, the losses, the gradients of what modules were given
(last module first), the gradients of parameters, their norm, counts, biases, moments, parameters.
What differs first has nothing before it to blame.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from titan_moe.debug.capture.records import PHASES, Place
from titan_moe.verify.gradients.compare import fingerprint
from titan_moe.verify.localize.capture_reader import Array, Captured, Ints, Whole
from titan_moe.verify.localize.words import experts_line, tokens_line

BOUNDS = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
"""What rounding may do to a value of each compute type, where no harmless run says more: relative
to the token's, the expert's or the tensor's norm."""
_CALIBRATED = {"float16": 2e-3, "bfloat16": 1e-2}
"""The same where a harmless run computed in a wider type, which shows all that rounding does."""
_WEAK = {"float64": 1e-3}
"""A value weaker than this share of the place's others is measured as if it had that share; in low
precision, every one is measured by the others."""
_HARMLESS_FACTOR, _OF_NUMBERS = 8.0, 32.0
"""On what a harmless run differs by; of single numbers, where luck may leave nothing."""
_UPDATES = {"float64": 1e-6, "float32": 1e-2, "float16": 0.1, "bfloat16": 0.3}
"""The same of what AdamW adds: where a gradient is next to nothing, rounding chooses its sign."""
_STORED = {"float64": 1e-14}
"""Share of a parameter that its update cannot resolve; 1e-6 where it is kept in float32."""
_EXACT = {"data": 0.0, "counts": 0.0, "start": 1e-12}
_EXACT_TENSORS = {"choice": 0.0, "num_targets": 0.0}


class Difference(NamedTuple):
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
    """Whether that is all keys of the place."""
    ranks: tuple[int, int] | None = None
    """Of the candidate, two that hold other values of what is one."""
    missing: bool = False
    """The candidate has nothing here, which is taken for zeros."""

    @property
    def ratio(self) -> float:
        """Of the candidate's norm to the baseline's."""
        ours, theirs = self.norms[1], self.norms[0]
        return 1.0 if ours == theirs else ours / theirs if theirs else np.inf

    @property
    def off_by(self) -> float:
        """The distance over the larger norm."""
        return self.distance / max(*self.norms, 1e-300)


@dataclass(frozen=True)
class Finding:
    """The first difference, and what there is to know about it."""

    difference: Difference
    tokens: str = ""
    """Which rows and positions."""
    experts: str = ""
    told: str = ""
    """What the ratio of norms gives away."""
    tie: str = ""
    """If a routing choice flipped because two experts scored alike: how far apart they were."""
    of_phase: tuple[int, int] = (0, 0)
    """Places of the phase that differ, and all of them."""
    equal: Sequence[str] = ()
    """What came before and is equal."""
    followers: Sequence[Difference] = field(default_factory=list)
    """The next places that differ."""

    @property
    def place(self) -> Place:
        return self.difference.place

    @property
    def is_tie(self) -> bool:
        """Rounding chose other experts: nothing is known to be wrong."""
        return bool(self.tie)

    def lines(self) -> list[str]:
        """For a person."""
        from titan_moe.verify.localize.words import finding_lines

        return finding_lines(self)


def locate(
    baseline: Captured, candidate: Captured, harmless: Sequence[Captured] = ()
) -> Finding | None:
    """The first place where two captures differ beyond rounding; None if there is none.

    Args:
        harmless: of the baseline with its rows in other orders, in other layouts: what rounding
            does at each place.
    """
    found = differences(baseline, candidate, harmless)
    wrong = [difference for difference in found if difference.error > difference.bound]
    if not wrong:
        return None
    first, phase = wrong[0], wrong[0].place.phase
    axes = _axes(baseline.facts["layout"], candidate.facts["layout"])
    phases = Counter(difference.place.phase for difference in found)
    before = [each for each in PHASES if each in phases]
    finding = Finding(
        difference=first,
        told=fingerprint(first.ratio, axes) if first.ranks is None else "",
        of_phase=(sum(each.place.phase == phase for each in wrong), phases[phase]),
        equal=before[: before.index(phase)],
        followers=wrong[1:],
    )
    if first.keys_are == "experts":
        finding = replace(finding, experts=experts_line(first.keys, first.whole))
    if first.keys_are == "tokens":
        finding = replace(finding, tokens=tokens_line(first.keys, baseline.rows, first.whole))
    if first.place.tensor == "choice":
        finding = _choices(finding, baseline, candidate, found)
    return finding


def differences(
    baseline: Captured, candidate: Captured, harmless: Sequence[Captured] = ()
) -> list[Difference]:
    """Of every place that both have, in causal order."""
    dtype = max(
        (str(each.facts["compute_dtype"]) for each in (baseline, candidate)),
        key=lambda name: BOUNDS[name],
    )
    weak, found = _WEAK.get(dtype, 1.0), _recomputed(candidate, dtype)
    calibrated = any(BOUNDS[str(each.facts["compute_dtype"])] < BOUNDS[dtype] for each in harmless)
    for place, ours in baseline.places.items():
        if place.phase == "recompute":
            continue
        bound = _bound(place, dtype, calibrated=calibrated)
        if place.phase == "update":
            bound = max(bound, _STORED.get(dtype, 1e-6) * _size_of_parameter(baseline, ours))
        for other in harmless:
            if bound and place in other.places:
                error = _compare(ours, other.places[place], weak, bound).error
                factor = _OF_NUMBERS if ours.keys_are == "numbers" else _HARMLESS_FACTOR
                bound = max(bound, factor * error)
        theirs = candidate.places.get(place)
        if theirs is None:
            if place.phase == "backward":
                found.append(_compare(ours, _zeros(ours), weak, bound)._replace(missing=True))
            continue
        difference = _compare(ours, theirs, weak, bound)
        apart = _apart(theirs, weak, bound)
        if apart is not None and difference.error <= bound:
            difference = apart
        elif apart is not None:
            difference = difference._replace(ranks=apart.ranks)
        found.append(difference)
    return sorted(found, key=lambda each: PHASES.index(each.place.phase))


def _size_of_parameter(captured: Captured, update: Whole) -> float:
    """The norm of a parameter over that of its update."""
    last = update.place.tensor.removeprefix("update of ")
    whole = captured.places[Place("start", update.place.module, last)]
    largest = _norms(update.values, False).max()
    return float(_norms(whole.values, True).max() / largest) if largest else 0.0


def _recomputed(candidate: Captured, dtype: str) -> list[Difference]:
    """What the candidate computed again, against its own forward."""
    places = [place for place in candidate.places if place.phase == "recompute"]
    twins = [candidate.places[place._replace(phase="forward")] for place in places]
    return [
        _compare(first, candidate.places[place], _WEAK.get(dtype, 1.0), BOUNDS[dtype])._replace(
            place=place
        )
        for place, first in zip(places, twins, strict=True)
    ]


def _bound(place: Place, dtype: str, *, calibrated: bool) -> float:
    if place.tensor in _EXACT_TENSORS:
        return _EXACT_TENSORS[place.tensor]
    if place.phase == "update":
        return _UPDATES[dtype]
    usual = _CALIBRATED.get(dtype, BOUNDS[dtype]) if calibrated else BOUNDS[dtype]
    return _EXACT.get(place.phase, usual)


def _compare(ours: Whole, theirs: Whole, weak: float, bound: float) -> Difference:
    """Key by key; a key that one side lacks counts as zeros there."""
    keys, (a, b) = _aligned(ours, theirs)
    exact = ours.exact and theirs.exact
    a_norms, b_norms = _norms(a, exact), _norms(b, exact)
    far = _far(a, b)
    errors = _errors(far, a_norms, b_norms, weak)
    wrong = errors > bound
    return Difference(
        place=ours.place,
        error=float(errors.max(initial=0.0)),
        bound=bound,
        keys=keys[wrong],
        norms=(_total(a_norms[wrong]), _total(b_norms[wrong])),
        distance=_total(far[wrong]),
        keys_are=ours.keys_are,
        whole=bool(wrong.all()),
    )


def _apart(whole: Whole, weak: float, bound: float) -> Difference | None:
    """Where ranks hold other values of what is one; None if they agree."""
    copies = whole.copies
    if not len(copies.keys):
        return None
    a_norms, b_norms = _norms(copies.first, whole.exact), _norms(copies.other, whole.exact)
    far = _far(copies.first, copies.other)
    errors = _errors(far, a_norms, b_norms, weak)
    wrong = errors > bound
    if not wrong.any():
        return None
    pair = copies.ranks[wrong][0]
    return Difference(
        place=whole.place,
        error=float(errors.max()),
        bound=bound,
        keys=np.unique(copies.keys[wrong], axis=0),
        norms=(_total(a_norms[wrong]), _total(b_norms[wrong])),
        distance=_total(far[wrong]),
        keys_are=whole.keys_are,
        whole=len(np.unique(copies.keys[wrong], axis=0)) == len(whole.keys),
        ranks=(int(pair[0]), int(pair[1])),
    )


def _far(a: Array, b: Array) -> Array:
    """The distance of each key, by what is linear in the tensors."""
    first = 0 if a.shape[1] == 1 else 1
    return np.sqrt(np.square(b[:, first:] - a[:, first:]).mean(1))


def _errors(far: Array, a_norms: Array, b_norms: Array, weak: float) -> Array:
    """Of each key: the distance over the larger norm; what is no number is infinitely far."""
    norms = np.maximum(a_norms, b_norms)
    usual = np.sqrt(np.square(norms).mean()) if len(norms) else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.where(far == 0, 0.0, far / np.maximum(norms, weak * usual))
    return np.where(np.isnan(errors), np.inf, errors)


def _norms(values: Array, exact: bool) -> Array:
    if values.shape[1] == 1:
        return np.abs(values[:, 0])
    if exact:
        return np.sqrt(values[:, 0])
    return np.sqrt(np.square(values[:, 1:]).mean(1))


def _total(norms: Array) -> float:
    return float(np.sqrt(np.square(norms).sum()))


def _aligned(ours: Whole, theirs: Whole) -> tuple[Ints, list[Array]]:
    """Both sides' values of all keys of either."""
    if np.array_equal(ours.keys, theirs.keys):
        return ours.keys, [ours.values, theirs.values]
    keys, where = np.unique(np.concatenate([ours.keys, theirs.keys]), axis=0, return_inverse=True)
    where = where.reshape(-1)
    sides = []
    for side, places in (
        (ours, where[: len(ours.keys)]),
        (theirs, where[len(ours.keys) :]),
    ):
        values = np.zeros((len(keys), side.values.shape[1]))
        values[places] = side.values
        sides.append(values)
    return keys, sides


def _zeros(whole: Whole) -> Whole:
    return replace(whole, values=np.zeros_like(whole.values))


def _axes(baseline: Mapping[str, int], candidate: Mapping[str, int]) -> dict[str, int]:
    """Axes of which one side has more ranks, by how many times."""
    sizes = {axis: candidate[axis] / baseline.get(axis, 1) for axis in candidate}
    sizes["fsdp"] = sizes["dp_shard"] * sizes["cp"]
    return {axis: round(max(size, 1 / size)) for axis, size in sizes.items()}


def _choices(
    finding: Finding, baseline: Captured, candidate: Captured, found: Sequence[Difference]
) -> Finding:
    """Which experts the tokens went to, and whether they scored alike."""
    place, keys = finding.place, finding.difference.keys
    ours, theirs = baseline.places[place], candidate.places[place]
    at, there = _rows_of(ours.keys, keys), _rows_of(theirs.keys, keys)
    margins = ours.beside["margins"][at]
    scores = place._replace(tensor="scores")
    bound = next(each.bound for each in found if each.place == scores)
    scale = _norms(baseline.places[scores].values, True).max()
    swaps: Counter[tuple[str, str]] = Counter()
    for a, b in zip(ours.beside["experts"][at], theirs.beside["experts"][there], strict=True):
        left, came = sorted(set(a) - set(b)), sorted(set(b) - set(a))
        swaps[" ".join(map(str, left)), " ".join(map(str, came))] += 1
    said = [f"{n} x {a} -> {b}" for (a, b), n in swaps.most_common(3)]
    experts = ", ".join(said) + (f" and {len(swaps) - 3} other changes" if len(swaps) > 3 else "")
    tie = ""
    if len(margins) and margins.max() <= 2 * bound * scale:
        tie = f"scores are at most {margins.max():.1e} apart"
    return replace(finding, experts=experts, tie=tie)


def _rows_of(keys: Ints, wanted: Ints) -> Ints:
    places = {tuple(key): row for row, key in enumerate(keys.tolist())}
    return np.array([places[tuple(key)] for key in wanted.tolist() if tuple(key) in places])
