"""Location and spread of control runs, and how far from them another curve lies.

Everything is measured at every step and as means over the last 1, 2, 4, ... steps; the arrays of
one window have S - window + 1 entries, the first of which ends at step index window - 1.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESOLUTION = 16 * float(np.finfo(np.float32).eps)
"""Losses and norms are added up in float32, whatever the model computes in, and a candidate may add
up in more ways than the controls do: no spread of their logarithms is less than this."""
_AHEAD, _BEHIND = 16, 2
"""Steps whose spread a step has at least: what later steps show may happen at any time, for it
takes one token that goes to another expert."""

Array = NDArray[np.float64]
Index = NDArray[np.intp]


class Fit(NamedTuple):
    """Location and spread of control runs at each step, and of the means of their differences."""

    location: Array
    """[Q, E, S]."""
    scale: Array
    """[Q, S]: what a difference at a step is divided by before means are taken."""
    middles: list[Array]
    """The size that noise alone gives a quantity, by window [Q, S - window + 1]; 0 for scalars."""
    spreads: list[Array]
    """The standard deviation of another curve's mean, by window [Q, S - window + 1]."""


class Quantities(ABC):
    """Q quantities of one kind, each E numbers at each step, in N control runs; all are finite.

    Args:
        runs_NQES: the control runs.
        resolution: no spread is less.
    """

    counted = 1
    """Numbers, of the E, that show one difference: a row at another expert shows in two."""
    ahead = _AHEAD
    """Steps after a step whose spreads it has at least."""

    def __init__(self, runs_NQES: Array, resolution: float) -> None:
        self._runs_NQES, self._resolution = runs_NQES, resolution
        every_run = np.arange(len(runs_NQES))
        self.fit = self._fit(every_run)
        self.largest = np.array(
            [
                max(
                    float(distance.max())
                    for _, distance in self._measured(own, self._fit(np.delete(every_run, i)))
                )
                for i, own in enumerate(runs_NQES)
            ]
        )
        """The largest distance of each control run from the others, in spreads."""

    def distances(self, values_QES: Array) -> list[tuple[int, Array]]:
        """Returns distances in spreads, by window: [Q, S - window + 1]. They are infinite from the
        first step on that is not finite."""
        finite_QES = np.isfinite(values_QES)
        broken_QS = np.logical_or.accumulate(~finite_QES.all(1), -1)
        measured = self._measured(np.where(finite_QES, values_QES, 0.0), self.fit)
        return [
            (window, np.where(broken_QS[:, window - 1 :], np.inf, distance))
            for window, distance in measured
        ]

    def _measured(self, values_QES: Array, fit: Fit) -> list[tuple[int, Array]]:
        scaled_QES = (values_QES - fit.location) / fit.scale[:, None]
        return [
            (window, (self.size(mean) - middle) / spread)
            for (window, mean), middle, spread in zip(
                scan(scaled_QES), fit.middles, fit.spreads, strict=True
            )
        ]

    def size(self, off_QES: Array) -> Array:
        """Returns the size of differences between runs: [..., Q, E, S] -> [..., Q, S]."""
        return np.abs(off_QES).sum(-2) / self.counted

    @abstractmethod
    def _fit(self, kept: Index) -> Fit:
        """Returns location and spread of the control runs of these indices."""


class Scalar(Quantities):
    """Q positive numbers at each step, compared by their logarithms: E is 1."""

    def _fit(self, kept: Index) -> Fit:
        logs_NQS = self._runs_NQES[kept, :, 0]
        # The location is a mean of N, and so are its own errors.
        wider = math.sqrt(1 + 1 / len(kept))
        location_QS = logs_NQS.mean(0)
        deviation_QS = np.maximum(logs_NQS.std(0, ddof=1), self._resolution)
        scale_QS = _smooth(deviation_QS, self.ahead) * wider
        spreads = [np.ones_like(scale_QS)]
        means = scan((logs_NQS - location_QS) / scale_QS)
        least = scan(self._resolution / scale_QS)
        for (_, mean_NQS), (_, least_QS) in zip(means[1:], least[1:], strict=True):
            deviation_QS = np.maximum(mean_NQS.std(0, ddof=1), least_QS)
            spreads.append(_smooth(deviation_QS, self.ahead) * wider)
        return Fit(location_QS[:, None], scale_QS, [np.zeros(1)] * len(spreads), spreads)


class Gradients(Scalar):
    """The norms of Q parts' gradients. Noise that every control run has from the first steps on
    grows in all of them alike, and spreads of many later steps would hide what is seen early. So
    looked at are as many steps ahead as the last control run took to part from the others."""

    def __init__(self, runs_NQES: Array, resolution: float) -> None:
        off_NS = np.abs(runs_NQES - np.median(runs_NQES, 0)).max((1, 2))
        apart_NS = np.pad(off_NS > resolution, ((0, 0), (0, 1)), constant_values=True)
        self.ahead = int(np.clip(apart_NS.argmax(1).max(), _BEHIND, _AHEAD))
        super().__init__(runs_NQES, resolution)


class Loads(Quantities):
    """The shares of Q layers' rows that their E experts took.

    Compared is the share of rows that went to other experts than in the controls' mean, half the
    sum of the differences of all experts. It is never below 0, and noise alone makes it large; so a
    control's location and spread are those of the others' distances, each from the mean of the
    rest. Over several steps the shares are averaged first: changes to and fro cancel.
    """

    counted = 2

    def _fit(self, kept: Index) -> Fit:
        """Fits the loads of one layer after another: those of all layers are large."""
        runs_NLES = self._runs_NQES
        number, layers = len(kept), range(runs_NLES.shape[1])
        location_LES = np.stack([runs_NLES[kept, each].mean(0) for each in layers])

        def differences(layer: int) -> Array:
            # A run's difference from the mean of the other runs, not of all.
            off_NES = runs_NLES[kept, layer] - location_LES[layer]
            return off_NES * (number / (number - 1))

        typical = [(self.size(differences(each)) ** 2).mean(0) for each in layers]
        scale_LS = _smooth(np.sqrt(np.maximum(typical, self._resolution**2)), self.ahead)
        moved_by_layer = [
            [self.size(mean) for _, mean in scan(differences(each) / scale_LS[each])]
            for each in layers
        ]
        middles, spreads = [], []
        least = scan(self._resolution / scale_LS)
        for moved, (window, least_LS) in zip(zip(*moved_by_layer, strict=True), least, strict=True):
            deviation_LS = np.stack([moved_NS.std(0, ddof=1) for moved_NS in moved])
            deviation_LS = np.maximum(deviation_LS, least_LS / window)
            middles.append(np.stack([moved_NS.mean(0) for moved_NS in moved]))
            spreads.append(_smooth(deviation_LS, self.ahead) * math.sqrt(1 + 1 / number))
        return Fit(location_LES, scale_LS, middles, spreads)


def scan(values: Array) -> list[tuple[int, Array]]:
    """Means over the last 1, 2, 4, ... steps: [..., S] -> (window, [..., S - window + 1])."""
    sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), values.cumsum(-1)], -1)
    windows = [2**i for i in range(values.shape[-1].bit_length())]
    return [(w, (sums[..., w:] - sums[..., :-w]) / w) for w in windows]


def shares(counts_SE: Array) -> Array:
    """Returns each expert's share of a step's rows."""
    counts_SE = np.asarray(counts_SE, dtype=np.float64)
    return counts_SE / np.maximum(counts_SE.sum(-1, keepdims=True), 1)


def _smooth(deviation_QS: Array, ahead: int) -> Array:
    """Raises values to the root mean square over all rows and nearby steps, mostly later ones."""
    squares_S = (deviation_QS**2).mean(0)
    sums = np.concatenate([np.zeros(1), squares_S.cumsum()])
    places = np.arange(len(squares_S))
    ends = np.minimum(places + ahead + 1, len(places))
    starts = np.maximum(places - _BEHIND, 0)
    around_S = (sums[ends] - sums[starts]) / (ends - starts)
    return np.asarray(np.sqrt(np.maximum(deviation_QS**2, around_S)))
