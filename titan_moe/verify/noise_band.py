"""How far curves of one training lie apart by rounding alone, and whether another curve lies
further.

In float32 and bfloat16 two right layouts train different bits, and small differences grow. So the
band is not a tolerance that someone chose: it is measured from harmless repeats, trainings that
differ in nothing but the order in which they add up (debug.permute_rows; noise_runs.py).

Compared are, at every step and as means over the last 2, 4, 8, ... steps, the logarithms of loss,
gradient norm and each parameter's norm, and each layer's expert load: the share of its rows that
went to other experts than in the repeats' mean. Noise from step to step averages out, what a
mistake does to every step does not. At each step and each mean, the repeats give a location and a
spread. A curve's statistic is its largest distance from the location in spreads, over everything.
Steps, means and quantities depend on each other, so no table knows what is large; the repeats do.
Each is measured against the others, as a candidate is, and a candidate is outside if it is

- further out than every repeat. Whatever the noise is like, that happens to one of the N + 1
  harmless curves, each as likely: false alarms in at most 1 of N + 1; and
- beyond the 1 - `false_alarms` prediction bound of a log-normal distribution of the statistic,
  fitted to the repeats' own. This asks for more than the first, the more the fewer they are, and
  its rate is as good as that assumption; and
- beyond what as many normal deviations would reach, independent of each other. This is the least
  where the repeats have equal bits, as float32 may have over a few steps.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from titan_moe.verify.noise_fit import Array, Load, Scalars, norm_logs, shares
from titan_moe.verify.records import LOAD_OF, NORM_OF, Curve

FEWEST_REPEATS = 4
FALSE_ALARMS = 1e-4
"""Of one comparison; of 300, three in a hundred suites have one."""
REPEATS = 24
"""Enough for the bound not to be much wider than it need be; with 8, it is half as wide again."""
_SCALARS = ("loss", "grad_norm")


@dataclass(frozen=True)
class Judgement:
    """Whether a candidate's curve is one of the repeats' kind."""

    name: str
    inside: bool
    statistic: float
    """Its largest distance, in spreads; 1 if less."""
    limit: float
    """The largest distance that is still inside."""
    repeats_as_far: int
    """Repeats whose own statistic is as large: without any assumption, p = (this + 1) / (N + 1)."""
    first_outside: int | None
    """The first step at which it is outside, and below the quantity that is furthest out there and
    the number of steps, this one the last, that were taken together."""
    quantity: str | None
    mean_over: int | None
    missing: Sequence[str] = ()
    """Quantities of the band that the candidate has not: it was judged without them."""

    def line(self) -> str:
        """For a person."""
        shown = f"{self.name}: {self.statistic:.1f} spreads away, limit {self.limit:.1f}"
        if self.inside:
            return f"{shown}: inside"
        steps = "" if self.mean_over == 1 else f" (mean of the last {self.mean_over} steps)"
        return f"{shown}: outside from step {self.first_outside} on, by {self.quantity}{steps}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Band:
    """What harmless repeats of one training measured together.

    Args:
        repeats: at least FEWEST_REPEATS curves over the same steps.
        false_alarms: the share of harmless curves that may fall outside, if the logarithm of the
            statistic is normal; in any case at most 1 / (number of repeats + 1) do.
        quantities: those to compare; left out, all that every repeat has.

    Raises ValueError for curves that are too few, not finite, or of different steps.
    """

    def __init__(
        self,
        repeats: Sequence[Curve],
        *,
        false_alarms: float = FALSE_ALARMS,
        quantities: Sequence[str] | None = None,
    ) -> None:
        if len(repeats) < FEWEST_REPEATS:
            raise ValueError(f"{len(repeats)} repeats: a band wants {FEWEST_REPEATS} or more")
        self.steps = list(repeats[0].steps)
        self.repeats = list(repeats)
        self.false_alarms = false_alarms
        common = [q for q in quantities_of(repeats[0]) if all(_has(one, q) for one in repeats)]
        self.quantities = tuple(q for q in common if quantities is None or q in quantities)
        """"loss", "grad_norm", "norm of NAME", "load of LAYER", in this order."""
        if not self.quantities:
            raise ValueError("the repeats have no quantity in common that could be compared")
        self._parts = [(names, self._part(names)) for names in self._groups()]
        parts = [part for _, part in self._parts]
        self.statistics = np.maximum(1.0, np.max([part.largest for part in parts], 0)).tolist()
        """Each repeat's, measured against the others; at least 1, for repeats with equal bits have
        no distances, and no logarithms of them."""
        independent = sum(fit.spread.size for part in parts for fit in part.fits)
        self.limit = max(
            *self.statistics,
            prediction_bound(self.statistics, false_alarms),
            NormalDist().inv_cdf(1 - false_alarms / (2 * independent)),
        )

    def judge(self, candidate: Curve) -> Judgement:
        """Compare a curve that was not among the repeats, in what quantities it has; what is not
        finite is outside.

        Raises ValueError for other steps, or if it has none of the band's quantities.
        """
        self._check_steps(candidate)
        missing = [q for q in self.quantities if not _has(candidate, q)]
        if len(missing) == len(self.quantities):
            raise ValueError(f"{candidate.name} has nothing of {', '.join(self.quantities[:3])}")
        statistic = 1.0
        hits: list[tuple[int, int, float, str]] = []
        for names, part in self._parts:
            known = np.array([q not in missing for q in names])[:, None]
            for window, distance_QS in part.distances(self._compared(candidate, names)):
                distance_QS = np.where(known, distance_QS, 0.0)
                statistic = max(statistic, float(distance_QS.max()))
                outside = np.flatnonzero((distance_QS > self.limit).any(0))
                if len(outside):
                    furthest = int(distance_QS[:, outside[0]].argmax())
                    distance = float(distance_QS[furthest, outside[0]])
                    hits.append((int(outside[0]) + window - 1, window, -distance, names[furthest]))
        step, window, _, quantity = min(hits) if hits else (None, None, None, None)
        return Judgement(
            candidate.name,
            inside=not hits,
            statistic=statistic,
            limit=self.limit,
            repeats_as_far=sum(own >= statistic for own in self.statistics),
            first_outside=None if step is None else self.steps[step],
            quantity=quantity,
            mean_over=window,
            missing=missing,
        )

    def values(self, curve: Curve, quantity: str) -> Array:
        """What is compared at each step, [S]: the scalar, or for an expert load the share of rows
        that went to other experts than in the repeats' mean."""
        _, part = self._find(quantity)
        if isinstance(part, Load):
            return part.moved(shares(curve.loads[quantity.removeprefix(LOAD_OF)]))
        return np.asarray(curve.scalars[quantity], dtype=np.float64)

    def location(self, quantity: str) -> Array:
        """The middle of the band at each step, [S], in the units of `values`."""
        row, part = self._find(quantity)
        location = part.fits[0].location[row]
        return location if isinstance(part, Load) else np.exp(location)

    def edges(self, quantity: str) -> tuple[Array, Array]:
        """Of the band at each step: the lowest and the highest values inside, [S] each."""
        row, part = self._find(quantity)
        location, reach = part.fits[0].location[row], self.limit * part.fits[0].spread[row]
        if isinstance(part, Load):
            return np.zeros_like(location), np.minimum(location + reach, 1.0)
        return np.exp(location - reach), np.exp(location + reach)

    def as_json(self) -> dict[str, Any]:
        """What the band was measured from and what it allows, but for parameters' norms."""
        edges = {q: self.edges(q) for q in self.quantities if not q.startswith(NORM_OF)}
        return {
            "repeats": [repeat.name for repeat in self.repeats],
            "statistics": self.statistics,
            "limit": self.limit,
            "false_alarms": {
                "if_log_normal": self.false_alarms,
                "at_most": 1 / (len(self.repeats) + 1),
            },
            "quantities": list(self.quantities),
            "steps": self.steps,
            "low": {q: low.tolist() for q, (low, _) in edges.items()},
            "high": {q: high.tolist() for q, (_, high) in edges.items()},
        }

    def _groups(self) -> list[tuple[str, ...]]:
        """Quantities that are compared in the same way: all scalars, and each layer's load."""
        scalars = tuple(q for q in self.quantities if not q.startswith(LOAD_OF))
        loads = [(q,) for q in self.quantities if q.startswith(LOAD_OF)]
        return [*([scalars] if scalars else []), *loads]

    def _part(self, names: tuple[str, ...]) -> Scalars | Load:
        values = []
        for repeat in self.repeats:
            self._check_steps(repeat)
            values.append(self._compared(repeat, names))
            if not np.isfinite(values[-1]).all():
                raise ValueError(f"the repeat {repeat.name} is not finite")
        if not names[0].startswith(LOAD_OF):
            return Scalars(np.stack(values))
        num_rows = float(self.repeats[0].loads[names[0].removeprefix(LOAD_OF)][0].sum())
        return Load(np.stack(values), num_rows)

    def _compared(self, curve: Curve, names: tuple[str, ...]) -> Array:
        """Logarithms [Q, S], or shares [S, E]; 0 for what the curve has not."""
        if not names[0].startswith(LOAD_OF):
            return _logs(curve, names)
        layer = names[0].removeprefix(LOAD_OF)
        num_experts = self.repeats[0].loads[layer].shape[1]
        found = np.asarray(curve.loads.get(layer, np.zeros((len(self.steps), num_experts))))
        if found.shape[1] != num_experts:
            raise ValueError(
                f"{curve.name} has {found.shape[1]} experts in {layer}, the band {num_experts}"
            )
        return shares(found)

    def _check_steps(self, curve: Curve) -> None:
        if list(curve.steps) != self.steps:
            raise ValueError(
                f"{curve.name} has {len(curve.steps)} steps, the band {len(self.steps)}: they must "
                "be the same"
            )

    def _find(self, quantity: str) -> tuple[int, Scalars | Load]:
        """Its row, and what holds it. KeyError for what the band has not."""
        for names, part in self._parts:
            if quantity in names:
                return names.index(quantity), part
        raise KeyError(quantity)


def quantities_of(curve: Curve) -> list[str]:
    """What a band can compare of a curve."""
    norms = [q for q in curve.scalars if q.startswith(NORM_OF)]
    loads = [LOAD_OF + layer for layer in curve.loads]
    return [*(q for q in _SCALARS if q in curve.scalars), *norms, *loads]


def _has(curve: Curve, quantity: str) -> bool:
    if quantity.startswith(LOAD_OF):
        return quantity.removeprefix(LOAD_OF) in curve.loads
    return quantity in curve.scalars


def _logs(curve: Curve, names: Sequence[str]) -> Array:
    """[Q, S]; 0 for what the curve has not."""
    found = {q: curve.scalars[q] for q in _SCALARS if q in names and q in curve.scalars}
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = {q: np.log(np.asarray(values, dtype=np.float64)) for q, values in found.items()}
        norms = [q for q in curve.scalars if q.startswith(NORM_OF)]
        if norms:
            rows = norm_logs(np.stack([curve.scalars[q] for q in norms]))
            logs |= dict(zip(norms, rows, strict=True))
    absent = np.zeros(len(curve.steps))
    return np.stack([logs.get(q, absent) for q in names])


def prediction_bound(statistics: Sequence[float], rate: float) -> float:
    """What another draw of a log-normal statistic exceeds with probability `rate`."""
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
