"""A trial is what a comparison is asked for: two runs, their control runs, and limits."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_moe.runtime import launch
from titan_moe.verify.compare import cost
from titan_moe.verify.compare.launch import num_nodes
from titan_moe.verify.compare.run_spec import RunSpec, parse_run_spec


@dataclass(frozen=True)
class Trial:
    """Two runs to compare, and how closely."""

    title: str
    baseline: RunSpec
    candidate: RunSpec
    num_control_runs: int
    """Variations of the baseline; 0: only bits are compared."""
    steps: int | None = None
    """Left out: as the configuration says."""
    controls: Sequence[Path] = ()
    """Finished control runs; with them, as with a tolerance, num_control_runs is 0."""
    tolerance: Mapping[str, float] | None = None
    """Largest relative differences by scalar, which judge in place of control runs."""
    control_layouts: Sequence[str] = ()
    """Layouts of control runs; empty: the neighbours of the baseline's layout."""
    seed: bool = True
    """Start all runs from one seed checkpoint; False: from weights that each draws itself, and
    refuse runs whose checksums differ."""
    max_slowdown: float | None = None
    """Largest growth of the time per step, as a share; None: time is not judged."""
    max_memory_growth: float | None = None
    """Largest growth of the memory, as a share; None: memory is not judged."""
    pin_routing: bool = False
    """Compare twice: with free routes, and with those of the baseline in all runs."""

    @property
    def limits(self) -> dict[str, float]:
        """Limits of costs by quantity."""
        both = {cost.TIME: self.max_slowdown, cost.MEMORY: self.max_memory_growth}
        return {quantity: limit for quantity, limit in both.items() if limit is not None}


def trial_of(title: str, common: RunSpec, baseline: str, candidate: str, **options: Any) -> Trial:
    """Makes the trial of two runs as a user writes them. Raises ConfigError.

    Args:
        common: what a run leaves out.
        options: the other fields of the trial.
    """
    # run_train.sh chooses the same: on each machine NGPU, its GPUs, else 2.
    named = os.environ.get("NGPU", "")
    here = int(named) if named.isdecimal() else launch.default_ranks(os.environ)
    ranks = num_nodes() * here
    first, second = (
        parse_run_spec(text, common, default_ranks=ranks) for text in (baseline, candidate)
    )
    return Trial(title, first, second, **options)
