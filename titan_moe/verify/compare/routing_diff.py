"""Routing flips: tokens that two runs sent to other experts.

A slot is one of a token's top_k choices. It has flipped where its expert is not among the other
run's choices for the same token; the order of a token's experts does not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_moe.config.errors import ConfigError
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.routing.record import Record, RecordedStep
from titan_moe.routing.replay import FLIPS_FILE
from titan_moe.runtime.errors import RunError

Counts = NDArray[np.int64]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Flips:
    """Flipped slots by step and MoE layer."""

    steps: Sequence[int]
    layers: Sequence[str]
    flipped_SL: Counts
    slots_SL: Counts
    drift_SL: Array | None = None
    """Mean relative difference of the weights of slots that did not flip; None if not recorded."""

    @property
    def share_SL(self) -> Array:  # noqa: N802  Named as what it returns.
        """Flipped slots of all."""
        return self.flipped_SL / self.slots_SL

    def line(self) -> str:
        """One sentence for a person."""
        flipped, slots = int(self.flipped_SL.sum()), int(self.slots_SL.sum())
        first, last = self.steps[0], self.steps[-1]
        said = f"{flipped:,} of {slots:,} routings flipped in steps {first} to {last}"
        if flipped:
            begins = self.steps[int(self.flipped_SL.any(1).argmax())]
            share_L = self.flipped_SL.sum(0) / self.slots_SL.sum(0)
            worst = int(share_L.argmax())
            said += (
                f" ({flipped / slots:.2g} of all), the first in step {begins}, most in "
                f"{self.layers[worst]} ({share_L[worst]:.2g})"
            )
        if self.drift_SL is not None:
            said += f"; the others' weights differ by {np.nanmean(self.drift_SL):.1e} on average"
        return said

    def as_json(self) -> dict[str, Any]:
        """Plain lists, [S][L]."""
        return {
            "steps": list(self.steps),
            "layers": list(self.layers),
            "flipped": self.flipped_SL.tolist(),
            "slots": self.slots_SL.tolist(),
            "drift": None if self.drift_SL is None else self.drift_SL.tolist(),
        }


def routing_flips(baseline: Path, candidate: Path) -> Flips:
    """Compare the steps that two records of one model and data share, made in whatever layouts.

    Raises ConfigError for records of different models or without a common step, RunError for
    damaged files and other data.
    """
    ours, theirs = Record(baseline), Record(candidate)
    theirs.check(ours.dims, key="routing record")
    steps = sorted(set(ours.steps) & set(theirs.steps))
    if not steps:
        raise ConfigError([f"{baseline} and {candidate} have no step in common"])
    layers = ours.dims.layers
    cells_SL = []
    for step in steps:
        pair = ours.step(step), theirs.step(step)
        cells_SL.append([_compare(*pair, layer) for layer in layers])
    flipped_SL, slots_SL, drift_SL = (
        np.array([[cell[place] for cell in cells_L] for cells_L in cells_SL]) for place in range(3)
    )
    return Flips(steps, layers, flipped_SL, slots_SL, drift_SL)


def replay_flips(folder: Path) -> Flips:
    """What a run with `debug.routing_replay` would have chosen otherwise, from its folder.

    Raises ConfigError if there is no such run.
    """
    path = folder / FLIPS_FILE
    lines = [line for line in read_json_lines(path) if "step" in line] if path.is_file() else []
    if not lines:
        raise ConfigError([f"{path} is not there: the run replayed no routings"])
    layers = list(lines[0]["flips"])
    flipped_SL = np.array([[line["flips"][layer] for layer in layers] for line in lines])
    slots_SL = np.array([[line["slots"]] * len(layers) for line in lines])
    return Flips([line["step"] for line in lines], layers, flipped_SL, slots_SL)


class _Cell(NamedTuple):
    flipped: int
    slots: int
    drift: float


def _compare(ours: RecordedStep, theirs: RecordedStep, layer: str) -> _Cell:
    """One layer of one step, part by part of the candidate. RunError if the data are others."""
    if ours.num_tokens(layer) != theirs.num_tokens(layer):
        raise RunError(f"{ours.name} and {theirs.name} do not have the same tokens")
    flipped, slots, drift = 0, 0, 0.0
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
        drift += float(apart_RPK[agreed_RPK].sum())
        flipped += int((~agreed_RPK).sum())
        slots += agreed_RPK.size
    return _Cell(flipped, slots, drift / max(slots - flipped, 1))
