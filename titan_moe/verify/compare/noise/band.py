"""The distance between curves of one training that rounding alone makes, and a test whether another
curve lies further out.

In float32 and bfloat16 two correct layouts train different bits, and small differences grow. So the
band is not a chosen tolerance: it is measured from control runs, trainings that differ only in the
order of their sums (debug.permute_rows; verify/compare/control_runs.py).

The baseline counts among the controls here. Compared are the logarithms of loss, gradient norm and
the norms of parts' own gradients, and each layer's expert load: the share of its rows that went to
other experts than in the controls' mean. At each step the controls give a location and a spread. A
difference is divided by the spread, and looked at alone and as a mean over the last 2, 4, 8, ...
steps: noise from step to step averages out, what a mistake does to every step does not. Each mean
has a spread of its own, again from the controls. No spread is less than a few roundings of float32
or one row, nor than what the steps after it show on average: one token that goes to another expert
may start at any step what most controls only do later (the sign rule of the routing bias turns one
row into many).

A curve's statistic is its largest distance in spreads over all steps and means: one for the loss,
one for the gradient norm, one for all loads, one for all parts' gradients. Steps, means and layers
depend on each other, so no table says what is large; the controls do. Each is measured against the
others, as a candidate is, and each of the four statistics gets a bound:

- the 1 - FALSE_ALARMS / 4 prediction bound of a log-normal distribution, fitted to the controls'
  own statistics; the fewer the controls, the further out. Its rate is as good as that assumption;
- but no less than the largest of as many independent normal deviations as it has numbers. This is
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

from titan_moe.config.errors import ConfigError
from titan_moe.verify.compare.noise.fit import (
    RESOLUTION,
    Array,
    Gradients,
    Loads,
    Quantities,
    Scalar,
    shares,
)
from titan_moe.verify.compare.records import (
    COMPARED,
    GRADIENT_OF,
    LOAD_OF,
    FirstDifference,
    RunRecord,
)

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


@dataclass(frozen=True)
class BandCheck:
    """The result for one candidate."""

    statistic: float
    """The candidate's largest distance over its bound."""
    limit: float
    """The largest statistic that is still inside: 1, or more where a control run's own is."""
    first: FirstDifference | None
    """The first step at which it is outside, by the quantity that is furthest out there; None if it
    is inside."""
    furthest: tuple[int, str]
    """Step and quantity of `statistic`."""

    @property
    def clear(self) -> bool:
        """Says whether the curve is so far outside the band that few control runs are enough."""
        return not self.statistic <= CLEARLY * self.limit


class Band:
    """The noise of one training, measured from its control runs.

    Args:
        curves: the baseline and at least FEWEST_CONTROLS control runs of it, over the same steps.
        quantities: those to compare, as far as all curves have them.

    Raises ConfigError for curves that are too few or not finite.
    """

    def __init__(self, curves: Sequence[RunRecord], quantities: Sequence[str]) -> None:
        if len(curves) <= FEWEST_CONTROLS:
            raise ConfigError(
                f"{len(curves) - 1} control runs: a band needs {FEWEST_CONTROLS} or more"
            )
        self.steps = list(curves[0].steps)
        self.curves = list(curves)
        self.false_alarms = FALSE_ALARMS
        known = set(quantities).intersection(*map(quantities_of, curves))
        self.quantities = tuple(q for q in quantities_of(curves[0]) if q in known)
        """"loss", "grad_norm", "load of LAYER", "gradient of LAYER ...", in this order."""
        self._names: dict[str, list[str]] = {}
        for quantity in self.quantities:
            self._names.setdefault(_kind(quantity), []).append(quantity)
        self._noise = {kind: self._measure(kind) for kind in self._names}
        self.bounds: dict[str, float] = {}
        """Bounds in spreads, by kind of quantity; correct curves exceed one at the stated rate."""
        own_KN = []
        rate = self.false_alarms / len(self._noise)
        for kind, noise in self._noise.items():
            # The bound needs logarithms of distances, which controls with equal bits do not have.
            own_KN.append(np.maximum(1.0, noise.largest))
            num_compared = sum(spread.size for spread in noise.fit.spreads)
            self.bounds[kind] = max(
                prediction_bound(own_KN[-1].tolist(), rate),
                NormalDist().inv_cdf(1 - rate / (2 * num_compared)),
            )
        bounds_K = np.array(list(self.bounds.values()))
        self.statistics: list[float] = (np.stack(own_KN) / bounds_K[:, None]).max(0).tolist()
        """The statistic of each of the curves, measured against the others."""
        self.limit = max(1.0, *self.statistics)

    def check(self, candidate: RunRecord) -> BandCheck:
        """Compares a curve that is not among the band's own, has their steps and all quantities of
        the band; a value that is not finite is outside."""
        statistic, furthest = 0.0, (self.steps[0], self.quantities[0])
        hits: list[tuple[int, int, float, str]] = []
        for kind, noise in self._noise.items():
            names = self._names[kind]
            for window, distance_QS in noise.distances(self._compared(candidate, kind)):
                distance_QS = distance_QS / self.bounds[kind]
                if (largest := float(distance_QS.max())) > statistic:
                    row, column = np.unravel_index(distance_QS.argmax(), distance_QS.shape)
                    statistic = largest
                    furthest = self.steps[int(column) + window - 1], names[int(row)]
                outside = np.flatnonzero((distance_QS > self.limit).any(0))
                if len(outside):
                    worst = int(distance_QS[:, outside[0]].argmax())
                    distance = float(distance_QS[worst, outside[0]])
                    hits.append((int(outside[0]) + window - 1, window, -distance, names[worst]))
        first = None
        if hits:
            place, window, distance, quantity = min(hits)
            reach = slice(place + 1 - window, place + 1)
            first = FirstDifference(
                self.steps[place],
                quantity,
                float(self.location(quantity)[reach].mean()),
                float(self.values(candidate, quantity)[reach].mean()),
                window,
                -distance,
            )
        return BandCheck(statistic, self.limit, first, furthest)

    def reaches(self, curve: RunRecord) -> dict[str, Array]:
        """The distance of each of the band's quantities at each step alone, [S] each: above 1 is
        outside."""
        found: dict[str, Array] = {}
        for kind, noise in self._noise.items():
            _, distance_QS = noise.distances(self._compared(curve, kind))[0]
            reach_QS = distance_QS / (self.bounds[kind] * self.limit)
            found |= dict(zip(self._names[kind], reach_QS, strict=True))
        return found

    def values(self, curve: RunRecord, quantity: str) -> Array:
        """The compared values at each step, [S]: the scalar, or for a load the share of rows that
        went to other experts than in the controls' mean."""
        if (kind := _kind(quantity)) != "load":
            return np.asarray(curve.scalars[quantity], dtype=np.float64)
        off_LES = self._compared(curve, kind) - self._noise[kind].fit.location
        return self._noise[kind].size(off_LES)[self._names[kind].index(quantity)]

    def location(self, quantity: str) -> Array:
        """The middle of the band at each step, [S], in the units of `values`."""
        kind = _kind(quantity)
        fit, row = self._noise[kind].fit, self._names[kind].index(quantity)
        if kind == "load":
            return fit.middles[0][row] * fit.scale[row]
        return np.exp(fit.location[row, 0])

    def edges(self, scalar: str) -> tuple[Array, Array]:
        """The lowest and the highest values of a scalar inside the band at each step, [S] each."""
        fit = self._noise[scalar].fit
        reach = np.minimum(self.limit * self.bounds[scalar] * fit.scale[0], _FARTHEST)
        middle = fit.location[0, 0]
        return np.exp(middle - reach), np.exp(middle + reach)

    def as_json(self) -> dict[str, Any]:
        """The control runs' statistics, and the bounds that follow from them."""
        return {
            "repeats": [curve.name for curve in self.curves],
            "statistics": self.statistics,
            "bounds": self.bounds,
            "limit": self.limit,
            "false_alarms": {
                "if_log_normal": self.false_alarms,
                "at_most": 1 / (len(self.curves) + 1),
            },
            "quantities": list(self.quantities),
            "steps": self.steps,
        }

    def _measure(self, kind: str) -> Quantities:
        values = [self._compared(curve, kind) for curve in self.curves]
        for curve, values_QES in zip(self.curves, values, strict=True):
            if not np.isfinite(values_QES).all():
                raise ConfigError(f"{curve.name}: {kind} is not finite")
        if kind in COMPARED:
            return Scalar(np.stack(values), RESOLUTION)
        loads = list(self.curves[0].loads.values())
        one_row = 1 / max((float(counts_SE[0].sum()) for counts_SE in loads), default=math.inf)
        if kind == "load":
            return Loads(np.stack(values), one_row)
        num_experts = max((counts_SE.shape[1] for counts_SE in loads), default=0)
        # Half a row at an expert of mean load.
        return Gradients(np.stack(values), max(num_experts * one_row / 2, RESOLUTION))

    def _compared(self, curve: RunRecord, kind: str) -> Array:
        """The logarithms of scalars, [Q, 1, S], or all layers' shares, [L, E, S]."""
        if kind != "load":
            with np.errstate(divide="ignore", invalid="ignore"):
                values_QS = np.stack([curve.scalars[name] for name in self._names[kind]])
                return np.log(np.asarray(values_QS, dtype=np.float64))[:, None]
        counts = [curve.loads[layer.removeprefix(LOAD_OF)] for layer in self._names[kind]]
        num_experts = self.curves[0].loads[self._names[kind][0].removeprefix(LOAD_OF)].shape[1]
        if any(counts_SE.shape[1] != num_experts for counts_SE in counts):
            raise ConfigError(f"{curve.name}: not every layer has {num_experts} experts")
        return np.stack([shares(counts_SE).T for counts_SE in counts])


def quantities_of(curve: RunRecord) -> list[str]:
    """Returns the quantities of a curve that a band can compare."""
    gradients = (key for key in curve.scalars if key.startswith(GRADIENT_OF))
    return [*COMPARED, *(LOAD_OF + layer for layer in curve.loads), *gradients]


def _kind(quantity: str) -> str:
    """ "loss", "grad_norm", "load" or "gradient": kinds have bounds of their own."""
    return quantity.split(" of ")[0]


def prediction_bound(statistics: Sequence[float], rate: float) -> float:
    """The value that another draw of a log-normal statistic exceeds with probability `rate`."""
    logs = np.log(statistics)
    number = len(logs)
    reach = student_t(rate, number - 1) * logs.std(ddof=1) * math.sqrt(1 + 1 / number)
    return math.exp(logs.mean() + reach)


def student_t(rate: float, degrees: int) -> float:
    """The value that Student's t exceeds with probability `rate`, below one half.

    With t = sqrt(degrees) tan(angle), the angle has the density cos(angle)^(degrees - 1).
    """
    edges = np.linspace(0, math.pi / 2, 2**18 + 1)
    density = np.cos((edges[1:] + edges[:-1]) / 2) ** (degrees - 1)
    beyond = np.append(density[::-1].cumsum()[::-1], 0.0)
    angle = np.interp(rate, (beyond / (2 * beyond[0]))[::-1], edges[::-1])
    return math.sqrt(degrees) * math.tan(angle)
