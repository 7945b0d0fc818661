"""Sketches of a step by place, as one rank has seen it, and the file that holds them."""

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.runtime.files import replacing


class Place(NamedTuple):
    """The place of a tensor in a step."""

    phase: str
    """One of PHASES."""
    module: str
    """The module's name in the model."""
    tensor: str
    """Name of one of its tensors; for a gradient, the tensor that it belongs to."""


PHASES = {
    "data": "what the step reads",
    "start": "parameters at the step's start",
    "forward": "forward",
    "loss": "losses",
    "recompute": "recomputed in the backward, against the candidate's own forward",
    "backward": "backward",
    "gradient": "gradients of parameters, summed over ranks",
    "norm": "gradient norm",
    "counts": "tokens per expert",
    "balance": "what routers keep for the next step",
    "moments": "moments of AdamW",
    "update": "what the optimizer adds",
    "parameters": "parameters at the step's end",
}
"""Phases in words, in the order in which a step makes one from the other. The reader makes
"update", which is the difference of parameters."""

TOKENS, EXPERTS, TENSOR, NUMBERS = "tokens", "experts", "tensor", "numbers"
"""Kinds of keys: `token_keys`; an expert's number; 0 for the whole tensor; a number's index."""
POSITION_BITS = 31


def token_keys(names_B: Tensor, positions_S: Tensor) -> Tensor:
    """Returns a key for each token, [B, S]: the sequence's fingerprint of 32 bits, then the
    position."""
    return (names_B[:, None] << POSITION_BITS) | positions_S


class Sketches(NamedTuple):
    """A tensor's sketches with their keys."""

    kind: str
    keys: Tensor
    """[N] int64."""
    values: Tensor
    """[N, P] sketches, or [N, 1] numbers."""
    summand: int = 0
    """The number of a shard, or of another summand of the whole, that these values are. Ranks'
    values of one key and one summand are copies; values of different summands are added."""


class Records:
    """Sketches by place."""

    def __init__(self) -> None:
        self._orders: dict[Place, tuple[int, int]] = {}
        self._chunks: dict[Place, list[Sketches]] = defaultdict(list)

    def expect(self, place: Place, stage: int) -> None:
        """Places of a phase are read by stage, and in each as they were expected first."""
        self._orders.setdefault(place, (stage, len(self._orders)))

    def add(self, place: Place, stage: int, sketches: Sketches) -> None:
        """Adds a few random projections of one tensor to the capture.

        Args:
            stage: of the pipeline, or a layer's number.
        """
        self.expect(place, stage)
        # Off the device at once: all of a step's sketches may be gigabytes.
        kept = sketches._replace(keys=sketches.keys.cpu(), values=sketches.values.cpu())
        self._chunks[place].append(kept)

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """Write all of it; a reader needs torch.load(weights_only=True)."""
        records = [
            {
                "place": list(place),
                "order": list(self._orders[place]),
                "kind": chunks[0].kind,
                "keys": torch.cat([each.keys for each in chunks]),
                "parts": torch.cat([torch.full_like(each.keys, each.summand) for each in chunks]),
                "values": torch.cat([each.values for each in chunks]),
            }
            for place, chunks in self._chunks.items()
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside:
            torch.save({"facts": facts, "records": records}, aside)
