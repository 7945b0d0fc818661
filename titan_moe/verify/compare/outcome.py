"""Outcomes of a comparison: verdicts with their exit codes, and the first step that differs."""

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """The outcome of a comparison, and the exit code of a command that ends with it."""

    IDENTICAL = "identical bits", 0
    INSIDE = "inside the noise band", 3
    WITHIN = "within the tolerance that was given", 3
    DIFFERENT = "different", 1
    UNJUDGED = "not judged: other bits, and nothing says how much rounding may do", 5
    TOO_SLOW = "too slow", 6
    TOO_LARGE = "too large", 6
    COST_UNJUDGED = "its cost cannot be told from noise", 5

    def __init__(self, words: str, exit_code: int) -> None:
        self.words, self.exit_code = words, exit_code

    @property
    def passes(self) -> bool:
        return self.exit_code in (0, 3)


@dataclass(frozen=True)
class FirstDifference:
    """The step at which the candidate first left the band; without a band, the baseline's bits."""

    step: int
    quantity: str
    """"loss", "grad_norm", "load of layers.1", ..."""
    baseline: float
    """The baseline's value; with a band, the middle of the band."""
    candidate: float
    mean_over: int = 1
    """Steps, this one the last, whose mean is what left the band."""
    distance: float | None = None
    """Distance at this step, in limits of the band; None without a band."""
    tolerance: float | None = None
    """The relative difference that was allowed; None if none was given."""

    def line(self) -> str:
        mean = "" if self.mean_over == 1 else f" (mean of the last {self.mean_over} steps)"
        here = f"at step {self.step}: {self.quantity}{mean} is {self.candidate:.8g}"
        if self.tolerance is not None:
            return f"first beyond {self.tolerance:g} {here}, {self.baseline:.8g} in the baseline"
        if self.distance is None:
            return f"first other bits {here} in the candidate, {self.baseline:.8g} in the baseline"
        return (
            f"first outside {here}, the control runs have {self.baseline:.8g}; that is "
            f"{self.distance:,.3g} times as far as rounding takes it"
        )
