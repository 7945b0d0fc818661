"""Judges whether a quantity grows with the steps of a run, by robust slopes."""

from collections.abc import Sequence
from math import isfinite, sqrt
from typing import NamedTuple

import numpy as np

_BLOCKS = 24
_NORMAL_95 = 1.96

FLAT, GROWS, UNCLEAR = "flat", "grows", "unclear"


class Slope(NamedTuple):
    """Growth of a quantity in 1,000 steps."""

    name: str
    unit: str
    first: float
    """Median of the first block after the warm-up."""
    last: float
    per_1000: float
    low: float
    """End of the interval that holds the slope in 95 of 100 runs."""
    high: float
    bound: float
    """Growth in 1,000 steps that counts as none."""

    @property
    def verdict(self) -> str:
        """Flat only if the whole interval is within the bound and nothing is NaN; so is falling."""
        if self.high <= self.bound and isfinite(self.per_1000):
            return FLAT
        return GROWS if self.low > 0 and self.per_1000 > self.bound else UNCLEAR


def slope(
    name: str, unit: str, bound: float, steps: Sequence[float], values: Sequence[float]
) -> Slope:
    """Returns the median of the slopes between any two of 24 blocks of successive samples (Theil
    and Sen).

    Blocks are summed up by their medians, because samples next to each other are not independent,
    as the interval needs them to be (Sen, JASA 63, 1968, from Kendall's tau). A burst, such as a
    save that is under way, moves neither the median of a block nor that of the slopes.

    Args:
        bound: growth in 1,000 steps that counts as none.
        steps: in ascending order, without the warm-up; at least two.
    """
    x, y = (
        np.array([np.median(block) for block in np.array_split(np.asarray(each, float), blocks)])
        for each in (steps, values)
        for blocks in [min(_BLOCKS, len(steps))]
    )
    first, second = np.triu_indices(len(x), k=1)
    apart = x[second] != x[first]
    slopes = np.sort((y[second] - y[first])[apart] / (x[second] - x[first])[apart])
    number = len(x)
    spread = _NORMAL_95 * sqrt(number * (number - 1) * (2 * number + 5) / 18)
    low = max(0, int((len(slopes) - spread) / 2))
    high = min(len(slopes) - 1, int((len(slopes) + spread) / 2))
    median, least, most = (
        1000 * float(each) for each in (np.median(slopes), slopes[low], slopes[high])
    )
    return Slope(name, unit, float(y[0]), float(y[-1]), median, least, most, bound)
