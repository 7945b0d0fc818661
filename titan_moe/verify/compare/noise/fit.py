"""Location and spread of control runs, and how far from them another curve lies.

Everything is measured at every step and as means over the last 1, 2, 4, ... steps; the arrays of
one window have S - window + 1 entries, the first of which ends at step index window - 1.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESOLUTION = 16 * float(np.finfo(np.float32).eps)
"""Losses and norms are added up in float32, whatever the model computes in, and a candidate may add
up in more ways than the controls do: no spread of their logarithms is less than this."""
NORM_RESOLUTION = 8 * RESOLUTION
"""One parameter's gradient may be a small difference of large sums."""
NORM_FLOOR = 1e-4
"""Share of the total norm below which a parameter's norm is noise."""
EXPERT_FLOOR = 0.25
"""Share of the root mean square over a stack's experts: one without rows has a norm of 0."""
_AHEAD, _BEHIND = 16, 2
"""Steps whose spread a step has at least: what later steps show may happen at any time, for it
takes one token that goes to another expert."""

Array = NDArray[np.float64]
Index = NDArray[np.intp]


class Fit(NamedTuple):
    """Location and spread of control runs at each step, and of the means of their differences."""

    location: Array
    """[Q, S], of loads [L, E, S]."""
    scale: Array
    """[Q, S]: what a difference at a step is divided by before means are taken."""
    middles: list[Array]
    """By window [Q, S - window + 1]: of loads what noise alone makes; of scalars 0."""
    spreads: list[Array]
    """By window [Q, S - window + 1]: the standard deviation of another curve's mean."""

    @property
    def num_compared(self) -> int:
        return sum(spread.size for spread in self.spreads)


class Scalars:
    """Q positive scalars of N control runs, compared by their logarithms, all of them finite.

    Args:
        logs_NQS: the logarithms.
        kin_Q: scalars with the same number are of a kind, and have much the same spread.
        resolution: no spread is less.
    """

    def __init__(self, logs_NQS: Array, kin_Q: Index, resolution: float = RESOLUTION) -> None:
        self._kin_Q, self._resolution = kin_Q, resolution
        self.fit = self._fit(logs_NQS)
        self.largest = np.array(
            [
                _largest(_scalar_distances(own, self._fit(np.delete(logs_NQS, i, 0))))
                for i, own in enumerate(logs_NQS)
            ]
        )
        """Each control run's largest distance from the others, in spreads."""

    def distances(self, logs_QS: Array) -> list[tuple[int, Array]]:
        """In spreads, by window: [Q, S - window + 1]; infinite from the first step on that is not
        finite."""
        logs_QS, broken_QS = _finite(logs_QS)
        return _until(broken_QS, _scalar_distances(logs_QS, self.fit))

    def _fit(self, logs_NQS: Array) -> Fit:
        # The location is a mean of N, and so are its own errors.
        wider = math.sqrt(1 + 1 / len(logs_NQS))
        location_QS = logs_NQS.mean(0)
        deviation_QS = np.maximum(logs_NQS.std(0, ddof=1), self._resolution)
        scale_QS = _smooth(deviation_QS, self._kin_Q) * wider
        spreads = [np.ones_like(scale_QS)]
        means = scan((logs_NQS - location_QS) / scale_QS)
        least = scan(self._resolution / scale_QS)
        for (_, mean_NQS), (_, least_QS) in zip(means[1:], least[1:], strict=True):
            deviation_QS = np.maximum(mean_NQS.std(0, ddof=1), least_QS)
            spreads.append(_smooth(deviation_QS, self._kin_Q) * wider)
        return Fit(location_QS, scale_QS, [np.zeros(1)] * len(spreads), spreads)


def _scalar_distances(logs_QS: Array, fit: Fit) -> list[tuple[int, Array]]:
    scaled_QS = (logs_QS - fit.location) / fit.scale
    return [
        (window, np.abs(mean) / spread)
        for (window, mean), spread in zip(scan(scaled_QS), fit.spreads, strict=True)
    ]


class Loads:
    """The shares of L layers' rows that their experts took in N control runs, all of them finite.

    Compared is the share of rows that went to other experts than in the controls' mean, half the
    sum of the differences of all experts. It is never below 0, and noise alone makes it large; so a
    control's location and spread are those of the others' distances, each from the mean of the
    rest. Over several steps the shares are averaged first: changes to and fro cancel.

    Args:
        shares_NLES: the shares.
        num_rows: of one layer in one step; no spread is less than one row.
    """

    def __init__(self, shares_NLES: Array, num_rows: float) -> None:
        self._resolution = 1 / num_rows
        every_run = np.arange(len(shares_NLES))
        self.fit = self._fit(shares_NLES, every_run)
        self.largest = np.array(
            [
                _largest(_load_distances(own, self._fit(shares_NLES, np.delete(every_run, i))))
                for i, own in enumerate(shares_NLES)
            ]
        )
        """Each control run's largest distance from the others, in spreads."""

    def moved(self, shares_LES: Array) -> Array:
        """The share of rows that went to other experts than in the controls' mean, [L, S]."""
        return _moved(shares_LES - self.fit.location)

    def distances(self, shares_LES: Array) -> list[tuple[int, Array]]:
        """In spreads, by window: [L, S - window + 1]; infinite from the first step on that is not
        finite."""
        known_LES, broken_LES = _finite(shares_LES)
        broken_LS = np.asarray(broken_LES.any(1))
        return _until(broken_LS, _load_distances(known_LES, self.fit))

    def _fit(self, shares_NLES: Array, kept: Index) -> Fit:
        """Fits the control runs that are kept; layer by layer, because all at once are large."""
        number, num_layers = len(kept), shares_NLES.shape[1]
        location_LES = np.stack([shares_NLES[kept, each].mean(0) for each in range(num_layers)])

        def differences(layer: int) -> Array:
            # From the mean of the rest, not of all.
            off_NES = shares_NLES[kept, layer] - location_LES[layer]
            return off_NES * (number / (number - 1))

        kin_L = np.zeros(num_layers, dtype=np.intp)
        typical = [(_moved(differences(each)) ** 2).mean(0) for each in range(num_layers)]
        scale_LS = _smooth(np.sqrt(np.maximum(typical, self._resolution**2)), kin_L)
        moved_by_layer = [
            [_moved(mean) for _, mean in scan(differences(each) / scale_LS[each])]
            for each in range(num_layers)
        ]
        middles, spreads = [], []
        least = scan(self._resolution / scale_LS)
        for moved, (window, least_LS) in zip(zip(*moved_by_layer, strict=True), least, strict=True):
            deviation_LS = np.stack([moved_NS.std(0, ddof=1) for moved_NS in moved])
            deviation_LS = np.maximum(deviation_LS, least_LS / window)
            middles.append(np.stack([moved_NS.mean(0) for moved_NS in moved]))
            spreads.append(_smooth(deviation_LS, kin_L) * math.sqrt(1 + 1 / number))
        return Fit(location_LES, scale_LS, middles, spreads)


def _load_distances(shares_LES: Array, fit: Fit) -> list[tuple[int, Array]]:
    scaled_LES = (shares_LES - fit.location) / fit.scale[:, None]
    return [
        (window, (_moved(mean) - middle) / spread)
        for (window, mean), middle, spread in zip(
            scan(scaled_LES), fit.middles, fit.spreads, strict=True
        )
    ]


def _largest(distances: list[tuple[int, Array]]) -> float:
    return max(float(distance.max()) for _, distance in distances)


def _until(
    broken: NDArray[np.bool_], distances: list[tuple[int, Array]]
) -> list[tuple[int, Array]]:
    return [
        (window, np.where(broken[:, window - 1 :], np.inf, distance))
        for window, distance in distances
    ]


def scan(values: Array) -> list[tuple[int, Array]]:
    """Means over the last 1, 2, 4, ... steps: [..., S] -> (window, [..., S - window + 1])."""
    sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), values.cumsum(-1)], -1)
    windows = [2**i for i in range(values.shape[-1].bit_length())]
    return [(w, (sums[..., w:] - sums[..., :-w]) / w) for w in windows]


def shares(counts_SE: Array) -> Array:
    """Each expert's share of a step's rows."""
    counts_SE = np.asarray(counts_SE, dtype=np.float64)
    return counts_SE / np.maximum(counts_SE.sum(-1, keepdims=True), 1)


def norm_logs(norms_QS: Array, stack_Q: Index, alone_Q: NDArray[np.bool_]) -> Array:
    """Logarithms of parameters' norms, all of those that a curve has. They come to an end far below
    the total norm, an expert's below its stack's."""
    squares_QS = np.asarray(norms_QS, dtype=np.float64) ** 2
    floor_QS = np.where(
        alone_Q[:, None],
        NORM_FLOOR**2 * squares_QS.sum(0),
        EXPERT_FLOOR**2 * _kin_means(squares_QS, stack_Q),
    )
    floor_QS = np.maximum(floor_QS, np.finfo(np.float64).tiny)
    return np.log(squares_QS + floor_QS) / 2


def _moved(off_ES: Array) -> Array:
    """[..., E, S] -> [..., S]."""
    return np.abs(off_ES).sum(-2) / 2


def _smooth(deviation_QS: Array, kin_Q: Index) -> Array:
    """At least the root mean square over its kin and the steps around, most of them later ones."""
    squares_QS = _kin_means(deviation_QS**2, kin_Q)
    sums = np.concatenate([np.zeros((len(squares_QS), 1)), squares_QS.cumsum(-1)], -1)
    places = np.arange(squares_QS.shape[-1])
    ends = np.minimum(places + _AHEAD + 1, len(places))
    starts = np.maximum(places - _BEHIND, 0)
    around_QS = (sums[:, ends] - sums[:, starts]) / (ends - starts)
    return np.sqrt(np.maximum(deviation_QS**2, around_QS))


def _kin_means(values_QS: Array, kin_Q: Index) -> Array:
    """For each row the mean of the rows that have its number."""
    sums = np.zeros((kin_Q.max() + 1, values_QS.shape[-1]))
    np.add.at(sums, kin_Q, values_QS)
    return (sums / np.bincount(kin_Q)[:, None])[kin_Q]


def _finite(values: Array) -> tuple[Array, NDArray[np.bool_]]:
    """With 0 for what is not finite, and where something was not at that step or before."""
    finite = np.isfinite(values)
    return np.where(finite, values, 0.0), np.logical_or.accumulate(~finite, -1)
