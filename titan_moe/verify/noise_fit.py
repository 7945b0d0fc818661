"""Location and spread of harmless repeats, and how far from them another curve lies.

Everything is measured at every step and as means over the last 1, 2, 4, ... steps; the arrays of
one window have S - window + 1 entries, the first of which ends at step index window - 1.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESOLUTION = float(np.finfo(np.float32).eps)
"""Losses and norms are added up in float32, whatever the model computes in: equal repeats know no
more than this of their logarithms. Of a load they know no more than one row."""
NORM_FLOOR = 1e-4
"""Of the total norm: what a parameter's norm has less is noise, or an expert without rows."""
_NEIGHBOURS = 2

Array = NDArray[np.float64]


class Fit(NamedTuple):
    """Of one window."""

    window: int
    location: Array
    """[Q, S - window + 1]."""
    spread: Array
    """The standard deviation of another curve's distance from the location."""


class Scalars:
    """Q scalars of N repeats, compared by their logarithms: logs_NQS, all of them finite."""

    def __init__(self, logs_NQS: Array) -> None:
        scans = scan(logs_NQS)
        self.fits = [_fit(window, values) for window, values in scans]
        self.largest = np.zeros(len(logs_NQS))
        """Each repeat's largest distance from the others, in spreads."""
        for window, values in scans:
            for i, own in enumerate(values):
                others = _fit(window, np.delete(values, i, 0))
                distance = np.abs(own - others.location) / others.spread
                self.largest[i] = max(self.largest[i], distance.max())

    def distances(self, logs_QS: Array) -> list[tuple[int, Array]]:
        """In spreads, by window: [Q, S - window + 1]; infinite from the first step on that is
        not finite."""
        logs_QS, broken_QS = _finite(logs_QS)
        found = []
        for fit, (window, values) in zip(self.fits, scan(logs_QS), strict=True):
            distance = np.abs(values - fit.location) / fit.spread
            found.append((window, np.where(broken_QS[:, window - 1 :], np.inf, distance)))
        return found


class Load:
    """The shares of a layer's rows that its experts took in N repeats: shares_NSE, all finite.

    Compared is the share of rows that went to other experts than in the repeats' mean, half the sum
    of the differences of all experts. It is never below 0, and noise alone makes it large; so a
    repeat's location and spread are those of the others' distances, each from the mean of the rest.
    Over several steps the shares are averaged first: what flips to and fro comes to nothing.

    Args:
        num_rows: of all experts in one step.
    """

    def __init__(self, shares_NSE: Array, num_rows: float) -> None:
        number = len(shares_NSE)
        self.fits, self.means_SE = [], []
        self.largest = np.zeros(number)
        """Each repeat's largest distance from the others, in spreads."""
        for window, values_NES in scan(shares_NSE.swapaxes(1, 2)):
            total_ES, resolution = values_NES.sum(0), 1 / (num_rows * window)
            self.fits.append(_fit_load(window, values_NES, total_ES, resolution))
            self.means_SE.append(total_ES.T / number)
            for i, own_ES in enumerate(values_NES):
                rest_ES = total_ES - own_ES
                others = _fit_load(window, np.delete(values_NES, i, 0), rest_ES, resolution)
                moved_S = _moved(own_ES, rest_ES / (number - 1))
                distance = (moved_S - others.location[0]) / others.spread[0]
                self.largest[i] = max(self.largest[i], distance.max())

    def moved(self, shares_SE: Array) -> Array:
        """The share of rows that went to other experts than in the repeats' mean, [S]."""
        return _moved(shares_SE.T, self.means_SE[0].T)

    def distances(self, shares_SE: Array) -> list[tuple[int, Array]]:
        """In spreads, by window: [1, S - window + 1]; infinite from the first step on that is
        not finite."""
        shares_ES, broken_ES = _finite(shares_SE.T)
        broken_S = broken_ES.any(0)
        found = []
        for fit, mean_SE, (window, values) in zip(
            self.fits, self.means_SE, scan(shares_ES), strict=True
        ):
            distance = (_moved(values, mean_SE.T) - fit.location) / fit.spread
            found.append((window, np.where(broken_S[window - 1 :], np.inf, distance)))
        return found


def scan(values: Array) -> list[tuple[int, Array]]:
    """Means over the last 1, 2, 4, ... steps: [..., S] -> (window, [..., S - window + 1])."""
    sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), values.cumsum(-1)], -1)
    windows = [2**i for i in range(values.shape[-1].bit_length())]
    return [(w, (sums[..., w:] - sums[..., :-w]) / w) for w in windows]


def shares(counts_SE: Array) -> Array:
    """Each expert's share of a step's rows."""
    counts_SE = np.asarray(counts_SE, dtype=np.float64)
    return counts_SE / np.maximum(counts_SE.sum(-1, keepdims=True), 1)


def norm_logs(norms_QS: Array) -> Array:
    """Logarithms of parameters' norms, all of those that a curve has. Far below the total norm they
    come to an end: an expert without rows has a norm of 0."""
    squares_QS = np.asarray(norms_QS, dtype=np.float64) ** 2
    return np.log(squares_QS + NORM_FLOOR**2 * squares_QS.sum(0)) / 2


def _fit(window: int, values_NQS: Array) -> Fit:
    deviation = np.maximum(values_NQS.std(0, ddof=1), RESOLUTION)
    # The location is a mean of N, and so are its own errors.
    spread = _smooth(deviation) * math.sqrt(1 + 1 / len(values_NQS))
    return Fit(window, values_NQS.mean(0), spread)


def _fit_load(window: int, values_NES: Array, total_ES: Array, resolution: float) -> Fit:
    number = len(values_NES)
    moved_NS = _moved(values_NES, (total_ES - values_NES) / (number - 1))
    deviation = np.maximum(moved_NS.std(0, ddof=1), resolution)[None]
    return Fit(window, moved_NS.mean(0)[None], _smooth(deviation) * math.sqrt(1 + 1 / number))


def _moved(shares_ES: Array, mean_ES: Array) -> Array:
    """[..., E, S] -> [..., S]."""
    return np.abs(shares_ES - mean_ES).sum(-2) / 2


def _smooth(deviation_QS: Array) -> Array:
    """At least the geometric mean with neighbouring steps: N is small, and a step whose repeats
    happen to lie close together must not make others look far away."""
    kernel = np.ones(2 * _NEIGHBOURS + 1)
    counts = _convolve(np.ones(deviation_QS.shape[-1]), kernel)
    logs = np.log(deviation_QS)
    means = np.stack([_convolve(row, kernel) for row in logs]) / counts
    return np.maximum(deviation_QS, np.exp(means))


def _convolve(row: Array, kernel: Array) -> Array:
    return np.convolve(row, kernel)[len(kernel) // 2 :][: len(row)]


def _finite(values: Array) -> tuple[Array, NDArray[np.bool_]]:
    """With 0 for what is not finite, and where something was not at that step or before."""
    finite = np.isfinite(values)
    return np.where(finite, values, 0.0), np.logical_or.accumulate(~finite, -1)
