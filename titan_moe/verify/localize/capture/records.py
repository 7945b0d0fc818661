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
    """Its name in the model."""
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


class Kind(NamedTuple):
    """The keys of a place's values, and the way to put ranks' parts together."""

    keys: str
    """"tokens": (row, position); "experts": (expert, 0); "tensor": (0, 0); "numbers": (i, 0)."""
    exact: bool = True
    """The sums of squares add up: not so for parts of a sum."""


TOKENS = Kind("tokens")
TOKEN_SUMS = Kind("tokens", exact=False)
EXPERTS = Kind("experts")
EXPERT_SUMS = Kind("experts", exact=False)
TENSOR = Kind("tensor")
NUMBERS = Kind("numbers")


class Laid(NamedTuple):
    """A tensor's sketches with the keys that they are of."""

    keys: Tensor
    """[N, 2] int64."""
    values: Tensor
    """[N, 1 + P] sketches, or [N, 1] numbers."""
    kind: Kind
    part: int = 0
    """The part of the whole that these values are; values of different parts are added."""


class Records:
    """Sketches by place. Ranks' values of one key and one part are copies; parts add up."""

    def __init__(self) -> None:
        self._kinds: dict[Place, Kind] = {}
        self._orders: dict[Place, tuple[int, int]] = {}
        self._chunks: dict[Place, list[dict[str, Tensor]]] = defaultdict(list)

    def add(self, place: Place, order: tuple[int, int], laid: Laid, **beside: Tensor) -> None:
        """Keeps a chunk of a place.

        Args:
            order: the stage of the pipeline, and the place's number in it.
            beside: more to keep of each key.
        """
        self._kinds[place] = laid.kind
        self._orders.setdefault(place, order)
        parts = torch.full((len(laid.keys),), laid.part, dtype=torch.int64)
        chunk = {"keys": laid.keys, "parts": parts, "values": laid.values, **beside}
        # Off the device at once: all of a step's sketches may be gigabytes.
        self._chunks[place].append({name: tensor.cpu() for name, tensor in chunk.items()})

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """Write all of it; a reader needs torch.load(weights_only=True)."""
        records = [
            {
                "place": list(place),
                "kind": list(self._kinds[place]),
                "order": list(self._orders[place]),
                **{name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]},
            }
            for place, chunks in self._chunks.items()
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside:
            torch.save({"facts": facts, "records": records}, aside)
