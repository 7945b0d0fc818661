"""Which expert choices two runs made differently.

A slot is one of a token's top_k choices. It has changed where its expert is not among the other
run's choices for the same token; the order of a token's experts does not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_moe.config.errors import ConfigError
from titan_moe.routing.record import Record, RecordedStep
from titan_moe.runtime.errors import RunError

Counts = NDArray[np.int64]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class RoutingDiff:
    """Changed slots by step and MoE layer."""

    steps: Sequence[int]
    layers: Sequence[str]
    changed_SL: Counts
    slots_SL: Counts
    drift_SL: Array
    """Mean relative difference of the weights of slots that did not change; NaN counts as inf."""

    @property
    def share_SL(self) -> Array:  # noqa: N802  Named as what it returns.
        """Changed slots of all."""
        return self.changed_SL / self.slots_SL

    def line(self) -> str:
        """One sentence for a person."""
        changed, slots = int(self.changed_SL.sum()), int(self.slots_SL.sum())
        first, last = self.steps[0], self.steps[-1]
        said = f"{changed:,} of {slots:,} expert choices differ in steps {first} to {last}"
        if changed:
            begins = self.steps[int(self.changed_SL.any(1).argmax())]
            share_L = self.changed_SL.sum(0) / self.slots_SL.sum(0)
            worst = int(share_L.argmax())
            said += (
                f" ({changed / slots:.2g} of all), the first in step {begins}, most in "
                f"{self.layers[worst]} ({share_L[worst]:.2g})"
            )
        return f"{said}; the others' weights differ by {self.drift_SL.mean():.1e} on average"

    def as_json(self) -> dict[str, Any]:
        """Plain lists, [S, L] each, under the keys of comparison.json."""
        return {
            "steps": list(self.steps),
            "layers": list(self.layers),
            "flipped": self.changed_SL.tolist(),
            "slots": self.slots_SL.tolist(),
            "drift": self.drift_SL.tolist(),
        }


def routing_diff(baseline: Path, candidate: Path) -> RoutingDiff:
    """Compare the steps that two records of one model and data share, made in whatever layouts.

    Raises ConfigError for records of different models or without a common step, RunError for
    damaged files and other data.
    """
    ours, theirs = Record(baseline), Record(candidate)
    theirs.check(ours.dims, key="routing record")
    steps, layers = sorted(set(ours.steps) & set(theirs.steps)), ours.dims.layers
    if not (steps and layers):
        raise ConfigError([f"{baseline} and {candidate} have no step in common, or no MoE layer"])
    cells_SL = []
    for step in steps:
        pair = ours.step(step), theirs.step(step)
        cells_SL.append([_compare(*pair, layer) for layer in layers])
    changed_SL, slots_SL, drift_SL = (
        np.array([[cell[field] for cell in cells_L] for cells_L in cells_SL]) for field in range(3)
    )
    return RoutingDiff(steps, layers, changed_SL, slots_SL, drift_SL)


class _Cell(NamedTuple):
    changed: int
    slots: int
    drift: float


def _compare(ours: RecordedStep, theirs: RecordedStep, layer: str) -> _Cell:
    """One layer of one step, part by part of the candidate. RunError if the data are others."""
    if not ours.num_tokens(layer) == theirs.num_tokens(layer) > 0:
        raise RunError(f"{ours.name} and {theirs.name} do not have the same tokens, or none")
    changed, slots, drift = 0, 0, 0.0
    for part in theirs.parts:
        if layer not in part.layers:
            continue
        their_experts = part.read(layer, "experts")
        our_experts = ours.experts(layer, part.tokens)
        same_RPKK = their_experts[..., :, None] == our_experts[..., None, :]
        agreed_RPK = same_RPKK.any(-1)
        # Each agreed slot's weight over there.
        place_RPK = same_RPKK.argmax(-1)
        our_weights = np.take_along_axis(ours.weights(layer, part.tokens), place_RPK, -1)
        their_weights = part.read(layer, "weights")
        apart_RPK = np.abs(their_weights.astype(np.float64) - our_weights)
        apart_RPK /= np.maximum(np.abs(our_weights), np.finfo(np.float32).tiny)
        drift += float(np.where(np.isnan(apart_RPK), np.inf, apart_RPK)[agreed_RPK].sum())
        changed += int((~agreed_RPK).sum())
        slots += agreed_RPK.size
    return _Cell(changed, slots, drift / max(slots - changed, 1))
