"""This rank's position in its run: step, phase, layer and region, with the times of its moves.

torch's flight recorder keeps the time of each collective. A hang report looks the position up by
that time ("layer 2's dispatch"), so that the collective itself pays nothing. Overlapped halves of a
pipeline's microbatches take turns, and share one position.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_MOVES = 8192
_PHASES = {
    "start": "starting",
    "data": "in the loader",
    "validation": "the validation",
    "checkpoint": "saving a checkpoint",
    "reshard": "moving to another layout",
}
_REGIONS = {
    "grad_norm": "the gradient norm",
    "optimizer": "the optimizer",
    "embedding": "the embedding",
    "loss": "the loss",
}


class Move(NamedTuple):
    """A rank's activity, and when it began."""

    time_ns: int
    """Nanoseconds since the epoch."""
    step: int
    phase: str
    """A phase of `metrics.run_log.Phases`; "start" before the first, "" between two."""
    layer: str
    """Words such as "layer 2" or "layer 2's backward"; "" outside the layers."""
    region: str
    """One of `profiling.regions.REGIONS`; "" outside all of them."""

    def words(self) -> str:
        """Returns the activity in words: "in layer 2's dispatch"."""
        if self.phase not in ("step", "validation"):
            return _PHASES.get(self.phase, "between two phases of a step")
        if self.region in _REGIONS:
            return f"in {_REGIONS[self.region]}"
        if self.layer.endswith("backward"):
            return f"in {self.layer}" + (f" ({self.region})" if self.region else "")
        if self.layer and self.region:
            return f"in {self.layer}'s {self.region}"
        return f"in {self.layer or self.region or _PHASES.get(self.phase, 'the step')}"


class Position:
    """The present position of this process, and the last moves that led there."""

    def __init__(self) -> None:
        self._moves = deque([Move(time.time_ns(), 0, "start", "", "")], maxlen=_MOVES)

    def enter_phase(self, phase: str, step: int | None = None) -> None:
        """Begin a phase, without layer and region; and a step, if `step` is given."""
        step = self.last().step if step is None else step
        self._moves.append(Move(time.time_ns(), step, phase, "", ""))

    def enter_layer(self, layer: str) -> None:
        last = self._moves[-1]
        self._moves.append(Move(time.time_ns(), last.step, last.phase, layer, last.region))

    def enter_region(self, region: str) -> None:
        last = self._moves[-1]
        self._moves.append(Move(time.time_ns(), last.step, last.phase, last.layer, region))

    def moves(self) -> list[Move]:
        """Returns the last moves, oldest first. Another thread may move on meanwhile."""
        # A deque's copy runs no Python code, so that no other thread can change it meanwhile.
        return list(self._moves.copy())

    def last(self) -> Move:
        return self._moves[-1]


POSITION = Position()
"""The position of this process, which is one rank."""


def at(moves: list[Move], time_ns: int) -> Move | None:
    """Returns the move during which an instant lies; None before the first."""
    index = bisect_right(moves, time_ns, key=lambda move: move.time_ns)
    return moves[index - 1] if index else None


class Inside:
    """`with Inside("dispatch"):` sets the region while the block runs. An exception leaves the
    position at the place of its origin."""

    __slots__ = ("_name", "_outer")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._outer = POSITION.last().region
        POSITION.enter_region(self._name)

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            POSITION.enter_region(self._outer)


def mark_layers(parts: Iterable[Any]) -> None:
    """Let the blocks of decoders tell POSITION when a rank enters and leaves them, forward and
    backward. Changes no value."""
    for part in parts:
        for name, block in part.blocks().items():
            words = name.replace(".block", "").replace("layers.", "layer ").replace(".", " ")
            # First of the block's hooks: what FSDP gathers for it is the layer's own.
            block.register_forward_pre_hook(partial(_enter, words), prepend=True)
            block.register_forward_hook(partial(_leave, words))
        if not isinstance(part.tok_embeddings, nn.Identity):
            part.tok_embeddings.register_forward_hook(partial(_leave, "the embedding"))


@torch.compiler.disable  # Hooks of a compiled block run before and after its graph, eagerly.
def _enter(layer: str, *_: Any) -> None:
    POSITION.enter_layer(layer)


@torch.compiler.disable
def _leave(layer: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Leave a layer's forward. Its backward begins with the gradient of its output."""
    POSITION.enter_layer("")
    if output.requires_grad:
        output.register_hook(partial(_enter, f"{layer}'s backward"))
