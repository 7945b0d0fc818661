"""The plan of least cost, by Dijkstra's algorithm over the shardings that a tensor can have on a
mesh. It takes up to half a second for four axes and eight for five."""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, prod
from operator import add
from typing import Any, Literal

import numpy as np
import torch

from titan_moe.distributed.boxes import sizes
from titan_moe.distributed.sharding import Sharding
from titan_moe.distributed.sharding_moves import COSTS, LOCAL_OPS, Move, State, moves_from

CostFunction = Callable[[tuple[int, ...], torch.dtype, tuple[str, ...], Sharding, Sharding], float]
"""Returns the cost of one move, at least 0 and the same on all ranks, from the whole tensor's shape
and type, the mesh axes that take part, and the shardings before and after."""
Cost = Literal["unit", "bytes"] | CostFunction
_Label = tuple[float, ...]


@dataclass
class Search:
    """Plans from one sharding of a tensor, over axes of more than one rank."""

    axes: Mapping[str, int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: State
    joint: bool
    _held: dict[tuple[tuple[str, ...], ...], int] = field(default_factory=dict)

    def run(
        self, target: State, cost: Cost | Literal["peak"], max_bytes: float
    ) -> tuple[float, list[tuple[State, Move]]] | None:
        """Returns the least cost, and the moves from source to target, each with the state before
        it, among those that hold at most `max_bytes`; None if there are none.
        """
        best: dict[State, _Label] = {self.source: (0, 0, 0, 0)}
        paths: dict[State, list[tuple[State, Move]]] = {self.source: []}
        queue = [(best[self.source], self.source)]
        done = set()
        while queue:
            _, state = heapq.heappop(queue)
            if state == target:
                return best[target][0], paths[target]
            if state in done:
                continue
            done.add(state)
            for move in moves_from(state, tuple(self.axes), joint=self.joint):
                if move.after in done or (max_bytes < inf and self.peak(state, move) > max_bytes):
                    continue
                label = self._label(best[state], state, move, cost)
                if move.after not in best or label < best[move.after]:
                    best[move.after] = label
                    paths[move.after] = [*paths[state], (state, move)]
                    heapq.heappush(queue, (label, move.after))
        return None

    def _label(self, label: _Label, before: State, move: Move, cost: Any) -> _Label:
        """Returns a path's cost, then what decides between paths of equal cost."""
        if cost == "peak":
            return max(label[0], self.peak(before, move)), 0, 0, 0
        unit, received = COSTS[move.op], self.received(before, move)
        found = {"unit": unit, "bytes": received}.get(cost)
        if found is None:
            ends = before.sharding(), move.after.sharding()
            found = cost(self.shape, self.dtype, move.axes, *ends)
        more = found, unit, len(move.axes) if move.op in LOCAL_OPS else 1, received
        return tuple(map(add, label, more))

    def received(self, before: State, move: Move) -> int:
        """Returns bytes of the rank that receives most."""
        num_ranks = prod(self.axes[axis] for axis in move.axes)
        if move.op in LOCAL_OPS:
            return 0
        if move.op == "all_reduce":
            return 2 * self._held_bytes(before) * (num_ranks - 1) // num_ranks
        if move.op == "reduce_scatter":
            return self._held_bytes(move.after) * (num_ranks - 1)
        return self._new_bytes(before, move.after)

    def peak(self, before: State, move: Move) -> int:
        """Returns bytes that `execute` holds at most on the rank that holds most, with the source,
        which its caller keeps. That is the first rank, whose parts are the largest."""
        held, after = self._held_bytes(before), self._held_bytes(move.after)
        num_ranks = prod(self.axes[axis] for axis in move.axes)
        source = 0 if before == self.source else self._held_bytes(self.source)
        if move.op in LOCAL_OPS or move.op == "all_reduce":
            return source + held + after
        # The buffer that is sent is freed before the part after the move is made.
        sent = held * num_ranks if move.op == "all_gather" else held
        received = after * num_ranks if move.op == "reduce_scatter" else after
        return source + held + received + max(sent, after)

    def _held_bytes(self, state: State) -> int:
        if state.cuts not in self._held:
            largest = Sharding(state.cuts).box(0, self.shape, self.axes)
            self._held[state.cuts] = prod(sizes(largest)) * self.dtype.itemsize
        return self._held[state.cuts]

    def _new_bytes(self, before: State, after: State) -> int:
        """Most bytes that a rank holds after a move and not before, counted on every rank."""
        wanted, kept, mesh = np.array(1), np.array(1), tuple(self.axes.items())
        for size, *cuts in zip(self.shape, before.cuts, after.cuts, strict=True):
            (old_start, old_stop), (start, stop) = (_bounds(size, cut, mesh) for cut in cuts)
            both = np.minimum(stop, old_stop) - np.maximum(start, old_start)
            wanted, kept = wanted * (stop - start), kept * np.maximum(both, 0)
        return int(np.max(wanted - kept)) * self.dtype.itemsize


@lru_cache(maxsize=4096)
def _bounds(
    size: int, cut: tuple[str, ...], mesh: tuple[tuple[str, int], ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the ranks' parts of a dim begin and end: `Sharding.box` for all ranks.

    Both have a dim for each axis of the mesh, of length 1 if the axis does not cut.
    """
    start, stop = (np.full([1] * len(mesh), edge) for edge in (0, size))
    places = np.indices([num_ranks for _, num_ranks in mesh], sparse=True)
    for axis in cut:
        number = [name for name, _ in mesh].index(axis)
        each = -(-(stop - start) // mesh[number][1])
        start = np.minimum(start + places[number] * each, stop)
        stop = np.minimum(start + each, stop)
    return start, stop
