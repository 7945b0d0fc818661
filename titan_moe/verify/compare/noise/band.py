"""The distance between curves of one training that rounding alone makes, and a test whether another
curve lies further out.

In float32 and bfloat16 two correct layouts train different bits, and small differences grow. So the
band is not a chosen tolerance: it is measured from control runs, trainings that differ only in the
order of their sums (debug.permute_rows; compare/control_runs.py).

Compared are the logarithms of loss, gradient norm and each parameter's norm, and each layer's
expert load: the share of its rows that went to other experts than in the controls' mean. At each
step the controls give a location and a spread. A difference is divided by the spread, and looked at
alone and as a mean over the last 2, 4, 8, ... steps: noise from step to step averages out, what a
mistake does to every step does not. Each mean has a spread of its own, again from the controls. No
spread is less than a few roundings of float32 or one row, nor than what the steps after it show on
average: one token that goes to another expert may start at any step what most controls only do
later (the sign rule of the routing bias turns one row into many).

A curve's statistic is its largest distance in spreads over all steps and means: one for the loss,
one for the gradient norm, one for all loads, one for all parameters' norms. Steps, means and
parameters depend on each other, so no table says what is large; the controls do. Each is measured
against the others, as a candidate is, and each of the four statistics gets a bound:

- the 1 - `false_alarms` / 4 prediction bound of a log-normal distribution, fitted to the controls'
  own statistics; the fewer the controls, the further out. Its rate is as good as that assumption;
- but no less than what as many normal deviations would reach, independent of each other. This is
  the bound where the controls have equal bits, as float32 may have over a few steps.

A candidate is outside if one of its statistics is beyond its bound, and further beyond than any
control's is. Whatever the noise is like, being further out than every control happens to one of the
N + 1 correct curves, each as likely: false alarms in at most 1 of N + 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_moe.config.errors import ConfigError
from titan_moe.verify.compare.noise.fit import (
    NORM_RESOLUTION,
    RESOLUTION,
    Array,
    Index,
    Loads,
    Scalars,
    norm_logs,
    shares,
)
from titan_moe.verify.compare.records import LOAD_OF, NORM_OF, Curve

FEWEST_CONTROLS = 4
EARLY_LOOKS = (6, 12)
"""Numbers of control runs after which a clear failure ends a comparison. A pass rests on all."""
CLEARLY = 10.0
"""Times the limit: a candidate that is further out at an early look is different. Were the limit of
a look used as it is, three looks would give three times the false alarms."""
FALSE_ALARMS = 1e-4
"""The rate of one comparison; of suites with 300, three in a hundred have one."""
_FARTHEST = 100.0
"""The widest drawn band, as a logarithm."""
_SCALARS = ("loss", "grad_norm")


@dataclass(frozen=True)
class BandCheck:
    """The result for one candidate."""

    name: str
    inside: bool
    statistic: float
    """The candidate's largest distance over its bound."""
    limit: float
    """The largest statistic that is still inside: 1, or more where a control run's own is."""
    first_outside: int | None
    """The first step at which it is outside, and below the quantity that is furthest out there and
    the number of steps, this one the last, that were taken together."""
    quantity: str | None
    mean_over: int | None
    distance: float | None
    """At that step, in the units of `statistic`."""
    furthest: tuple[int, str]
    """Step and quantity of `statistic`."""
    missing: Sequence[str] = ()
    """Quantities of the band that the candidate has not: it was judged without them."""

    @property
    def clear(self) -> bool:
        """Says whether it is so far outside that few control runs are enough."""
        return not self.statistic <= CLEARLY * self.limit


class Band:
    """The noise of one training, measured from its control runs.

    Args:
        controls: at least FEWEST_CONTROLS curves over the same steps.
        false_alarms: the share of correct curves that may fall outside, if the logarithm of the
            statistic is normal; in any case at most 1 / (number of controls + 1) do.

    Raises ConfigError for curves that are too few, not finite, or of different steps.
    """

    def __init__(self, controls: Sequence[Curve], *, false_alarms: float = FALSE_ALARMS) -> None:
        if len(controls) < FEWEST_CONTROLS:
            raise ConfigError(
                [f"{len(controls)} control runs: a band needs {FEWEST_CONTROLS} or more"]
            )
        self.steps = list(controls[0].steps)
        self.controls = list(controls)
        self.false_alarms = false_alarms
        known = quantities_of(controls[0])
        self.quantities = tuple(q for q in known if all(_has(one, q) for one in controls))
        """"loss", "grad_norm", "norm of NAME", "load of LAYER", in this order."""
        if not self.quantities:
            raise ConfigError(
                ["the control runs have no quantity in common that could be compared"]
            )
        self._parts = {
            kind: self._part(kind) for kind in dict.fromkeys(map(_kind, self.quantities))
        }
        self.bounds: dict[str, float] = {}
        """In spreads, by kind of quantity: what a correct curve reaches as seldom as stated."""
        own_KN = []
        rate = false_alarms / len(self._parts)
        for kind, part in self._parts.items():
            # At least 1: controls with equal bits have no distances, and no logarithms of them.
            own_KN.append(np.maximum(1.0, part.largest))
            self.bounds[kind] = max(
                prediction_bound(own_KN[-1].tolist(), rate),
                NormalDist().inv_cdf(1 - rate / (2 * part.fit.num_compared)),
            )
        bounds_K = np.array(list(self.bounds.values()))
        self.statistics: list[float] = (np.stack(own_KN) / bounds_K[:, None]).max(0).tolist()
        """Each control run's, measured against the others."""
        self.limit = max(1.0, *self.statistics)

    def check(self, candidate: Curve) -> BandCheck:
        """Compare a curve that was not among the controls, in what quantities it has; what is not
        finite is outside.

        Raises ConfigError for other steps, or if it has none of the band's quantities.
        """
        self._check_steps(candidate)
        missing = [q for q in self.quantities if not _has(candidate, q)]
        if len(missing) == len(self.quantities):
            raise ConfigError([f"{candidate.name} has nothing of {', '.join(self.quantities[:3])}"])
        statistic, furthest = 0.0, (self.steps[0], self.quantities[0])
        hits: list[tuple[int, int, float, str]] = []
        for kind, part in self._parts.items():
            names = self._names(kind)
            known = np.array([q not in missing for q in names])[:, None]
            for window, distance_QS in part.distances(self._compared(candidate, kind)):
                distance_QS = np.where(known, distance_QS / self.bounds[kind], 0.0)
                if (largest := float(distance_QS.max())) > statistic:
                    row, column = np.unravel_index(distance_QS.argmax(), distance_QS.shape)
                    statistic = largest
                    furthest = self.steps[int(column) + window - 1], names[int(row)]
                outside = np.flatnonzero((distance_QS > self.limit).any(0))
                if len(outside):
                    worst = int(distance_QS[:, outside[0]].argmax())
                    distance = float(distance_QS[worst, outside[0]])
                    hits.append((int(outside[0]) + window - 1, window, -distance, names[worst]))
        first = min(hits, default=None)
        return BandCheck(
            candidate.name,
            inside=first is None,
            statistic=statistic,
            limit=self.limit,
            first_outside=None if first is None else self.steps[first[0]],
            quantity=None if first is None else first[3],
            mean_over=None if first is None else first[1],
            distance=None if first is None else -first[2],
            furthest=furthest,
            missing=missing,
        )

    def reaches(self, curve: Curve) -> dict[str, Array]:
        """The distance of each quantity of a curve at each step alone, [S] each: above 1 is
        outside. Raises ConfigError for other steps."""
        self._check_steps(curve)
        found: dict[str, Array] = {}
        for kind, part in self._parts.items():
            _, distance_QS = next(iter(part.distances(self._compared(curve, kind))))
            reach_QS = distance_QS / (self.bounds[kind] * self.limit)
            found |= dict(zip(self._names(kind), reach_QS, strict=True))
        return {q: reach_S for q, reach_S in found.items() if _has(curve, q)}

    def values(self, curve: Curve, quantity: str) -> Array:
        """The compared values at each step, [S]: the scalar, or for a load the share of rows that
        went to other experts than in the controls' mean."""
        row, part = self._find(quantity)
        if isinstance(part, Loads):
            return part.moved(self._compared(curve, "load"))[row]
        return np.asarray(curve.scalars[quantity], dtype=np.float64)

    def location(self, quantity: str) -> Array:
        """The middle of the band at each step, [S], in the units of `values`."""
        row, part = self._find(quantity)
        if isinstance(part, Loads):
            return part.fit.middles[0][row] * part.fit.scale[row]
        return np.exp(part.fit.location[row])

    def edges(self, quantity: str) -> tuple[Array, Array]:
        """The lowest and the highest values inside the band at each step, [S] each."""
        row, part = self._find(quantity)
        limit = self.limit * self.bounds[_kind(quantity)]
        if isinstance(part, Loads):
            highest = part.fit.middles[0][row] + limit * part.fit.spreads[0][row]
            return np.zeros_like(highest), np.minimum(highest * part.fit.scale[row], 1.0)
        reach = np.minimum(limit * part.fit.scale[row], _FARTHEST)
        return np.exp(part.fit.location[row] - reach), np.exp(part.fit.location[row] + reach)

    def as_json(self) -> dict[str, Any]:
        """The control runs' statistics, and the bounds that follow from them."""
        return {
            "repeats": [control.name for control in self.controls],
            "statistics": self.statistics,
            "bounds": self.bounds,
            "limit": self.limit,
            "false_alarms": {
                "if_log_normal": self.false_alarms,
                "at_most": 1 / (len(self.controls) + 1),
            },
            "quantities": list(self.quantities),
            "steps": self.steps,
        }

    def _names(self, kind: str) -> list[str]:
        return [q for q in self.quantities if _kind(q) == kind]

    def _part(self, kind: str) -> Scalars | Loads:
        values = []
        for control in self.controls:
            self._check_steps(control)
            values.append(self._compared(control, kind))
            if not np.isfinite(values[-1]).all():
                raise ConfigError([f"the control run {control.name}: {kind} is not finite"])
        if kind != "load":
            kin_Q, _ = _stacks(self._names(kind))
            resolution = NORM_RESOLUTION if kind == "norm" else RESOLUTION
            return Scalars(np.stack(values), kin_Q, resolution)
        num_rows = max(float(np.max(counts[0].sum())) for counts in self.controls[0].loads.values())
        return Loads(np.stack(values), num_rows)

    def _compared(self, curve: Curve, kind: str) -> Array:
        """Logarithms [Q, S], or shares [L, E, S]; 0 for what the curve has not."""
        if kind != "load":
            return _logs(curve, self._names(kind))
        layers = [q.removeprefix(LOAD_OF) for q in self._names(kind)]
        num_experts = self.controls[0].loads[layers[0]].shape[1]
        absent = np.zeros((len(self.steps), num_experts))
        counts = [np.asarray(curve.loads.get(layer, absent)) for layer in layers]
        if any(counts_SE.shape != absent.shape for counts_SE in counts):
            raise ConfigError([f"{curve.name}: its layers have not all {num_experts} experts"])
        return np.stack([shares(counts_SE).T for counts_SE in counts])

    def _check_steps(self, curve: Curve) -> None:
        if list(curve.steps) != self.steps:
            raise ConfigError(
                [
                    f"{curve.name} has {len(curve.steps)} steps, the band {len(self.steps)}: they "
                    "must be the same"
                ]
            )

    def _find(self, quantity: str) -> tuple[int, Scalars | Loads]:
        """Its row, and what holds it. ValueError for what the band has not."""
        kind = _kind(quantity)
        return self._names(kind).index(quantity), self._parts[kind]


def quantities_of(curve: Curve) -> list[str]:
    """The quantities of a curve that a band can compare."""
    norms = [q for q in curve.scalars if q.startswith(NORM_OF)]
    loads = [LOAD_OF + layer for layer in curve.loads]
    return [*(q for q in _SCALARS if q in curve.scalars), *norms, *loads]


def _kind(quantity: str) -> str:
    """ "loss", "grad_norm", "norm" or "load": kinds have bounds of their own."""
    return quantity.split(" of ")[0]


def _has(curve: Curve, quantity: str) -> bool:
    if quantity.startswith(LOAD_OF):
        return quantity.removeprefix(LOAD_OF) in curve.loads
    return quantity in curve.scalars


def _logs(curve: Curve, names: Sequence[str]) -> Array:
    """[Q, S]; 0 for what the curve has not."""
    absent = np.zeros(len(curve.steps))
    with np.errstate(divide="ignore", invalid="ignore"):
        if not names[0].startswith(NORM_OF):
            known = [np.asarray(curve.scalars.get(q, absent + 1), dtype=np.float64) for q in names]
            return np.log(np.stack(known))
        norms = [q for q in curve.scalars if q.startswith(NORM_OF)]
        if not norms:
            return np.stack([absent for _ in names])
        rows = norm_logs(np.stack([curve.scalars[q] for q in norms]), *_stacks(norms))
    logs = dict(zip(norms, rows, strict=True))
    return np.stack([logs.get(q, absent) for q in names])


def _stacks(names: Sequence[str]) -> tuple[Index, NDArray[np.bool_]]:
    """A number for each, the same for experts of one stack, and whether it is alone."""
    numbers: dict[str, int] = {}
    kin_Q = np.array([numbers.setdefault(q.split("[")[0], len(numbers)) for q in names])
    return kin_Q, np.bincount(kin_Q)[kin_Q] == 1


def prediction_bound(statistics: Sequence[float], rate: float) -> float:
    """The value that another draw of a log-normal statistic exceeds with probability `rate`."""
    logs = np.log(statistics)
    number = len(logs)
    reach = student_t(rate, number - 1) * logs.std(ddof=1) * math.sqrt(1 + 1 / number)
    return math.exp(logs.mean() + reach)


def student_t(rate: float, degrees: int) -> float:
    """The value that Student's t exceeds with probability `rate`, by bisection."""
    low, high = 0.0, 1.0
    while _beyond_t(high, degrees) > rate:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _beyond_t(middle, degrees) > rate else (low, middle)
    return high


def _beyond_t(value: float, degrees: int) -> float:
    """The chance to exceed it (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(value / math.sqrt(degrees))
    square, odd = math.cos(angle) ** 2, degrees % 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= square * (k - 1) / k
        total += term
    if not odd:
        return (1 - math.sin(angle) * total) / 2
    inner = angle + (math.sin(angle) * total if degrees > 1 else 0.0)
    return (1 - 2 / math.pi * inner) / 2
