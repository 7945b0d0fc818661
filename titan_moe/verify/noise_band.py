"""How far curves of one training lie apart by rounding alone, and whether another curve lies
further.

In float32 and bfloat16 two right layouts train different bits, and small differences grow. So the
band is not a tolerance that someone chose: it is measured from harmless repeats, trainings that
differ in nothing but the order in which they add up (noise_runs.py makes them).

Compared are the logarithms of loss and gradient norm, at every step and as means over the last 2,
4, 8, ... steps: noise from step to step averages out, what a mistake does to every step does not.
At each step and each mean, the repeats give a location and a spread. A curve's statistic is its
largest distance from the location in spreads. Steps, means and quantities depend on each other, so
no table knows what is large; the repeats do. Each is measured against the others, as a candidate
is, and a candidate is outside if it is

- further out than every repeat. Whatever the noise is like, that happens to one of the N + 1
  harmless curves, each as likely: false alarms in at most 1 of N + 1; and
- beyond the 1 - `false_alarms` prediction bound of a log-normal distribution of the statistic,
  fitted to the repeats' own. This asks for more than the first where N is small, and its rate
  is as good as that assumption; and
- beyond what as many normal deviations would reach, independent of each other. This is the least
  where the repeats have equal bits, as float32 may have over a few steps.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_moe.metrics.jsonl import read_json_lines

QUANTITIES = ("loss", "grad_norm")
FEWEST_REPEATS = 4
RESOLUTION = float(np.finfo(np.float32).eps)
"""Losses and norms are added up in float32, whatever the model computes in: equal repeats know no
more than this of their logarithms."""
_NEIGHBOURS = 2

Array = NDArray[np.float64]


class Curve(NamedTuple):
    """What one training measured."""

    name: str
    steps: Sequence[int]
    loss: Array
    grad_norm: Array


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
    """The first step at which it is outside, and below the first and the last of the quantity's
    steps that were taken together."""
    quantity: str | None
    mean_over: int | None

    def line(self) -> str:
        """For a person."""
        shown = f"{self.name}: {self.statistic:.1f} spreads away, limit {self.limit:.1f}"
        if self.inside:
            return f"{shown}: inside"
        steps = "" if self.mean_over == 1 else f" (mean of the last {self.mean_over} steps)"
        return f"{shown}: outside from step {self.first_outside} on, by {self.quantity}{steps}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _Scan(NamedTuple):
    """Means over the last `window` steps, of one curve or of many, [..., 2, S - window + 1]."""

    window: int
    values: Array


class _Fit(NamedTuple):
    window: int
    location: Array
    """[2, S - window + 1]."""
    spread: Array
    """The standard deviation of another curve's distance from the location."""


class Band:
    """What harmless repeats of one training measured together.

    Args:
        repeats: at least FEWEST_REPEATS curves over the same steps.
        false_alarms: the share of harmless curves that may fall outside, if the logarithm of the
            statistic is normal; in any case at most 1 / (number of repeats + 1) do.

    Raises ValueError for curves that are too few, not finite, or of different steps.
    """

    def __init__(self, repeats: Sequence[Curve], *, false_alarms: float = 0.01) -> None:
        if len(repeats) < FEWEST_REPEATS:
            raise ValueError(f"{len(repeats)} repeats: a band wants {FEWEST_REPEATS} or more")
        self.steps = list(repeats[0].steps)
        logs_NQS = np.stack([self._logs(repeat) for repeat in repeats])
        for repeat, logs_QS in zip(repeats, logs_NQS, strict=True):
            if not np.isfinite(logs_QS).all():
                raise ValueError(f"the repeat {repeat.name} is not finite")
        self.repeats = list(repeats)
        self.false_alarms = false_alarms
        self._fits = _fit(logs_NQS)
        self.statistics = [
            _statistic(_distances(logs_NQS[i], _fit(np.delete(logs_NQS, i, 0))))
            for i in range(len(repeats))
        ]
        """Each repeat's, measured against the others."""
        independent = sum(fit.spread.size for fit in self._fits)
        self.limit = max(
            *self.statistics,
            prediction_bound(self.statistics, false_alarms),
            NormalDist().inv_cdf(1 - false_alarms / (2 * independent)),
        )

    def judge(self, candidate: Curve) -> Judgement:
        """Compare a curve that was not among the repeats; what is not finite is outside."""
        distances = _distances(self._logs(candidate), self._fits)
        statistic = _statistic(distances)
        hits = []
        for fit, distance in zip(self._fits, distances, strict=True):
            quantity, end = np.nonzero(distance > self.limit)
            hits += [
                (e + fit.window - 1, fit.window, q) for q, e in zip(quantity, end, strict=True)
            ]
        first, window, q = min(hits) if hits else (None, None, None)
        return Judgement(
            candidate.name,
            inside=not hits,
            statistic=statistic,
            limit=self.limit,
            repeats_as_far=sum(own >= statistic for own in self.statistics),
            first_outside=None if first is None else self.steps[first],
            quantity=None if q is None else QUANTITIES[q],
            mean_over=None if window is None else int(window),
        )

    def edges(self) -> tuple[Array, Array]:
        """Of the band at each step: the lowest and the highest values inside, [2, S] each."""
        each_step = self._fits[0]
        reach = self.limit * each_step.spread
        return np.exp(each_step.location - reach), np.exp(each_step.location + reach)

    def location(self) -> Array:
        """The middle of the band at each step, [2, S]."""
        return np.exp(self._fits[0].location)

    def as_json(self) -> dict[str, Any]:
        """What the band was measured from and what it allows."""
        low, high = self.edges()
        return {
            "repeats": [repeat.name for repeat in self.repeats],
            "statistics": self.statistics,
            "limit": self.limit,
            "false_alarms": {
                "if_log_normal": self.false_alarms,
                "at_most": 1 / (len(self.repeats) + 1),
            },
            "steps": self.steps,
            "low": dict(zip(QUANTITIES, low.tolist(), strict=True)),
            "high": dict(zip(QUANTITIES, high.tolist(), strict=True)),
        }

    def _logs(self, curve: Curve) -> Array:
        if list(curve.steps) != self.steps:
            raise ValueError(
                f"{curve.name} has {len(curve.steps)} steps, the band {len(self.steps)}: they must "
                "be the same"
            )
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(np.stack([curve.loss, curve.grad_norm]).astype(np.float64))


def read_curve(metrics_jsonl: Path) -> Curve:
    """The curve of a run that has ended, named by its folder."""
    lines = [line for line in read_json_lines(metrics_jsonl) if "step" in line]
    values = {
        key: np.array([math.nan if line[key] is None else line[key] for line in lines])
        for key in QUANTITIES
    }
    steps = [line["step"] for line in lines]
    return Curve(metrics_jsonl.parent.name, steps, values["loss"], values["grad_norm"])


def prediction_bound(statistics: Sequence[float], rate: float) -> float:
    """What another draw of a log-normal statistic exceeds with probability `rate`."""
    logs = np.log(statistics)
    number = len(logs)
    reach = student_t(rate, number - 1) * logs.std(ddof=1) * math.sqrt(1 + 1 / number)
    return math.exp(logs.mean() + reach)


def student_t(rate: float, degrees: int) -> float:
    """The value that Student's t exceeds with probability `rate`, by the expansion of Cornish and
    Fisher (Abramowitz and Stegun 26.7.5): within 2 % for 3 degrees of freedom and rates of 1 %."""
    z = NormalDist().inv_cdf(1 - rate)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def _scan(logs: Array) -> list[_Scan]:
    """Means over the last 1, 2, 4, ... steps. [..., S] -> [..., S - window + 1] for each."""
    sums = np.concatenate([np.zeros((*logs.shape[:-1], 1)), logs.cumsum(-1)], -1)
    windows = [2**i for i in range(logs.shape[-1].bit_length())]
    return [_Scan(w, (sums[..., w:] - sums[..., :-w]) / w) for w in windows]


def _fit(logs_NQS: Array) -> list[_Fit]:
    """Location and spread of N curves; the spread takes its neighbours in, for N is small."""
    fits = []
    for window, values in _scan(logs_NQS):
        deviation = np.maximum(values.std(0, ddof=1), RESOLUTION)
        # The location is a mean of N, and so are its own errors.
        spread = _smooth(deviation) * math.sqrt(1 + 1 / len(values))
        fits.append(_Fit(window, values.mean(0), spread))
    return fits


def _smooth(deviation: Array) -> Array:
    """The geometric mean with neighbouring steps, so that a spread that grows keeps its slope."""
    kernel = np.ones(2 * _NEIGHBOURS + 1)
    logs = np.log(deviation)
    counts = _convolve(np.ones(logs.shape[-1]), kernel)
    return np.exp(np.stack([_convolve(row, kernel) for row in logs]) / counts)


def _convolve(row: Array, kernel: Array) -> Array:
    return np.convolve(row, kernel)[len(kernel) // 2 :][: len(row)]


def _distances(logs_QS: Array, fits: Sequence[_Fit]) -> list[Array]:
    """In spreads, for each window; infinite from the first step that is not finite."""
    bad_steps = np.flatnonzero(~np.isfinite(logs_QS).all(0))
    num_steps = logs_QS.shape[-1]
    broken = int(bad_steps[0]) if len(bad_steps) else num_steps
    known = np.where(np.arange(num_steps) < broken, logs_QS, 0.0)
    found = []
    for fit, (window, values) in zip(fits, _scan(known), strict=True):
        distance = np.abs(values - fit.location) / fit.spread
        distance[:, max(0, broken - window + 1) :] = np.inf
        found.append(distance)
    return found


def _statistic(distances: Sequence[Array]) -> float:
    """At least 1: repeats with equal bits have no distances, and no logarithms of them."""
    return max(1.0, *(float(distance.max()) for distance in distances))


def plot_band(band: Band, candidates: Sequence[Curve], png: Path) -> None:
    """Draw repeats and candidates as relative distances from the band's middle, and the band."""
    # Imported here: it costs a second at start. Figure without pyplot needs no display.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 8), layout="constrained")
    (low, high), middle = band.edges(), band.location()
    judgements = [band.judge(candidate) for candidate in candidates]
    for q, quantity in enumerate(QUANTITIES):
        axes = figure.add_subplot(2, 1, q + 1)
        for i, repeat in enumerate(band.repeats):
            label = f"{len(band.repeats)} harmless repeats" if i == 0 else None
            own = getattr(repeat, quantity) / middle[q] - 1
            axes.plot(band.steps, own, color="gray", linewidth=0.7, label=label)
        edges = low[q] / middle[q] - 1, high[q] / middle[q] - 1
        axes.fill_between(band.steps, *edges, color="tab:blue", alpha=0.15, label="band")
        for candidate, judgement in zip(candidates, judgements, strict=True):
            own = getattr(candidate, quantity) / middle[q] - 1
            word = "inside" if judgement.inside else f"outside from step {judgement.first_outside}"
            style = "-" if judgement.inside else "--"
            axes.plot(band.steps, own, style, linewidth=1.3, label=f"{candidate.name}: {word}")
        # Linear where float32 ends, so that early and late steps are both seen.
        axes.set_yscale("symlog", linthresh=max(RESOLUTION, float(np.median(edges[1])) / 10))
        axes.yaxis.set_major_formatter("{x:.0e}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(title=f"{quantity}, relative distance from the repeats' middle", xlabel="step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(*labels, frameon=False, fontsize="small", loc="outside lower center", ncols=3)
    figure.savefig(png, dpi=120)
