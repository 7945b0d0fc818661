"""Costs of two trainings, time per step and memory, against limits.

Where time is judged, baseline and candidate are trained several times in turn, all of them now and
here, so that a machine that becomes slower does so for both. A run's figure is the median of its
steps after a warm-up, and a training's the median of its runs: one slow step or run counts for
nothing. How far the runs of one training lie apart is the resolution of the measurement.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from titan_moe.verify.compare.records import RunRecord, Verdict

WARM_UP = 5
"""First steps that are left out: they compile, and fill caches of the allocator."""
FEWEST_STEPS = 2 * WARM_UP
PAIRS = 3
"""Runs of each training where time is judged: the fewest whose median one bad run cannot move."""
TIME, MEMORY = "time per step", "memory"
_EXCEEDED = {TIME: Verdict.TOO_SLOW, MEMORY: Verdict.TOO_LARGE}


@dataclass(frozen=True)
class CostCheck:
    """One cost of both trainings, and its limit."""

    quantity: str
    """TIME in seconds, or MEMORY in GiB."""
    baseline: Sequence[float]
    """Figure of each run."""
    candidate: Sequence[float]
    limit: float
    """Largest growth that passes, as a share of the baseline."""

    @property
    def growth(self) -> float:
        """Returns by what share the candidate's median is above the baseline's."""
        return median(self.candidate) / median(self.baseline) - 1

    @property
    def spreads(self) -> dict[str, float]:
        """Returns the growth from the least to the largest run of each training."""
        both = {"baseline": self.baseline, "candidate": self.candidate}
        return {role: max(runs) / min(runs) - 1 for role, runs in both.items()}

    @property
    def verdict(self) -> Verdict | None:
        """None within the limit. COST_UNJUDGED where runs of one training lie further apart than
        the limit, unless every pair of runs says the same."""
        growths = [theirs / ours - 1 for ours in self.baseline for theirs in self.candidate]
        if max(self.spreads.values()) > self.limit and min(growths) <= self.limit < max(growths):
            return Verdict.COST_UNJUDGED
        return _EXCEEDED[self.quantity] if self.growth > self.limit else None

    @property
    def medians(self) -> list[str]:
        """Returns the medians of baseline and candidate with their unit."""
        unit = "s" if self.quantity == TIME else "GiB"
        return [f"{median(runs):.4g} {unit}" for runs in (self.baseline, self.candidate)]

    def as_json(self) -> dict[str, Any]:
        verdict = None if self.verdict is None else self.verdict.name.lower()
        return asdict(self) | {"growth": self.growth, "verdict": verdict}

    def line(self) -> str:
        """Returns the check for a reader."""
        ours, theirs = self.medians
        verdict = "within the limit" if self.verdict is None else self.verdict.words
        spreads = [
            f"the {role}'s {len(runs)} runs differ by {100 * self.spreads[role]:.1f} %"
            for role, runs in (("baseline", self.baseline), ("candidate", self.candidate))
            if len(runs) > 1
        ]
        found = (
            f"{self.quantity}: {theirs} against {ours}, {100 * self.growth:+.1f} % (limit "
            f"{100 * self.limit:.3g} %): {verdict}"
        )
        return "; ".join([found, *spreads])


def measure(runs: Sequence[RunRecord]) -> dict[str, list[float]]:
    """Returns each run's seconds per step and GiB, medians of its steps after the warm-up.

    Seconds lie between two logged steps, with data and without validation. Memory is the first
    rank's "memory/peak_gib": on a GPU tensors at the step's peak, on a CPU the process at its
    largest so far. Of a golden, what it holds.
    """
    found: dict[str, list[float]] = {TIME: [], MEMORY: []}
    for run in runs:
        if run.folder is None:
            return dict(run.facts["costs"])
        tokens_S, rate_S, gib_S = (
            run.scalars[key][WARM_UP - 1 :]
            for key in ("tokens", "tokens_per_second", "memory/peak_gib")
        )
        found[TIME].append(float(np.median(np.diff(tokens_S) / rate_S[1:])))
        found[MEMORY].append(float(np.median(gib_S[1:])))
    return found
