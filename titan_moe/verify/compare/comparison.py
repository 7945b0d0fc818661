"""Two runs side by side, and the verdict."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from titan_moe.runtime.revision import code_in_words
from titan_moe.verify.compare.cost import CostCheck
from titan_moe.verify.compare.noise.band import Band, BandCheck
from titan_moe.verify.compare.pinned_routes import Flips, flip_rows
from titan_moe.verify.compare.records import (
    COMPARED,
    FirstDifference,
    RunRecord,
    Verdict,
    compared,
    relative_difference,
)


@dataclass(frozen=True)
class Comparison:
    """The verdict on two runs, and the curves and band that it rests on."""

    title: str
    baseline: RunRecord
    candidate: RunRecord
    verdict: Verdict
    """The verdict on the curves."""
    first: FirstDifference | None = None
    """None if the verdict passes."""
    band: Band | None = None
    band_check: BandCheck | None = None
    caveats: Sequence[str] = field(default_factory=list)
    """Reasons to trust the verdict less: another device, another torch, fewer steps, ..."""
    costs: Sequence[CostCheck] = ()
    """Time and memory, as far as they have limits."""
    free: "Comparison | None" = None
    """The same comparison with free routes, where this one is with pinned routes."""
    flips: Sequence[Flips] = ()
    """Flips of the candidate and of the control runs, with pinned routes."""

    @property
    def outcome(self) -> Verdict:
        """The verdict on the curves, or on a cost that exceeds its limit where the curves pass. Of
        curves with pinned routes: different too where they are with free ones, as a router that
        chooses wrongly makes them."""
        if self.free is not None and self.free.verdict is Verdict.DIFFERENT:
            return Verdict.DIFFERENT
        failed = [cost.verdict for cost in self.costs if cost.verdict is not None]
        if not failed or not self.verdict.passes:
            return self.verdict
        return min(failed, key=lambda verdict: verdict is Verdict.COST_UNJUDGED)

    @property
    def words(self) -> str:
        """The outcome in words, with the verdict on the curves."""
        curves = f"{self.verdict.words}{'' if self.free is None else ' with pinned routes'}"
        free = " with free ones" if self.outcome is Verdict.DIFFERENT else ""
        return (
            curves if self.outcome is self.verdict else f"{curves}, but {self.outcome.words}{free}"
        )

    def lines(self) -> list[str]:
        """Returns lines for a reader, the verdict first."""
        found = [f"{self.title}: {self.words}"]
        for role, run in (("baseline", self.baseline), ("candidate", self.candidate)):
            if code := run.facts.get("code"):
                found.append(f"{role} ran {code_in_words(code)}")
        found += self.reasons()
        largest = [f"{q} {share:.2g} at step {step}" for q, (step, share) in self.largest().items()]
        found.append(f"largest relative difference: {', '.join(largest)}")
        for _, number, share, others, mean, most in flip_rows(self.flips)[:1]:
            found.append(
                f"flipped tokens: {number}, {share} % of all layers' (control runs: {others} %), "
                f"mean margin {mean}, largest {most}"
            )
        if self.free is not None:
            words = [f"with free routes: {self.free.verdict.words}", *self.free.reasons()]
            found.append("; ".join(words))
        return found + [f"CAVEAT: {caveat}" for caveat in self.caveats]

    def reasons(self) -> list[str]:
        """Returns lines: the first difference, the largest one, what the band cannot see, the
        costs."""
        found = [] if self.first is None else [self.first.line()]
        if self.band_check is not None and self.band is not None:
            found += _band_lines(self.band, self.band_check)
        return [*found, *(cost.line() for cost in self.costs)]

    def largest(self) -> dict[str, tuple[int, float]]:
        """Returns the step at which loss and gradient norm differ most, and by what share of the
        baseline's value; infinite where one run alone is finite."""
        first, second = self.baseline, self.candidate
        found = {}
        for quantity in compared(first, second):
            share_S = relative_difference(first.scalars[quantity], second.scalars[quantity])
            at = int(np.nan_to_num(share_S, nan=-1.0).argmax())
            found[quantity] = first.steps[at], float(share_S[at])
        return found

    def as_json(self) -> dict[str, Any]:
        """The verdict and its reasons, without the curves."""
        return {
            "title": self.title,
            "verdict": self.outcome.name.lower(),
            "curves": self.verdict.name.lower(),
            "exit_code": self.outcome.exit_code,
            "costs": [cost.as_json() for cost in self.costs],
            "baseline": {"name": self.baseline.name, **self.baseline.facts},
            "candidate": {"name": self.candidate.name, **self.candidate.facts},
            "steps": list(self.baseline.steps),
            "largest": {
                quantity: {"step": step, "relative": share if math.isfinite(share) else None}
                for quantity, (step, share) in self.largest().items()
            },
            "first": None if self.first is None else asdict(self.first),
            "judgement": None if self.band_check is None else asdict(self.band_check),
            "band": None if self.band is None else self.band.as_json(),
            "caveats": list(self.caveats),
            "free": None if self.free is None else self.free.as_json(),
            "flips": [each.summary()._asdict() for each in self.flips],
        }


def _band_lines(band: Band, check: BandCheck) -> list[str]:
    """Lines on the candidate's largest distance, and on differences that the band cannot see."""
    step, quantity = check.furthest
    widths = []
    for scalar in [q for q in COMPARED if q in band.quantities]:
        low, high = band.edges(scalar)
        widths.append(f"{scalar} by {math.sqrt(high[-1] / low[-1]) - 1:.1e}")
    return [
        f"largest distance of all steps: {check.statistic:,.3g} times as far as rounding takes it "
        f"(limit {check.limit:.3g}), at step {step}, by {quantity}; measured by the baseline and "
        f"{len(band.curves) - 1} control runs, one correct run in {1 / band.false_alarms:,.0f} "
        "fails",
        f"too small to see at the last step: {' or '.join(widths)} of its value",
    ]
