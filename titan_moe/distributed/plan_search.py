"""The plan of least cost, by Dijkstra's algorithm over the shardings that a tensor can have on a
mesh. It takes up to half a second for four axes."""

import heapq
from math import prod

from titan_moe.distributed.sharding import Sharding
from titan_moe.distributed.sharding_moves import (
    COSTS,
    LOCAL_OPS,
    Move,
    State,
    moves_from,
)


class Search:
    def __init__(
        self,
        axes: dict[str, int],
        shape: tuple[int, ...],
        itemsize: int,
        joint: bool,
    ) -> None:
        self._axes, self._shape, self._itemsize = axes, shape, itemsize
        self._joint = joint
        self._held: dict[tuple[tuple[str, ...], ...], int] = {}

    def run(self, source: State, target: State) -> tuple[list[tuple[State, Move]], int]:
        """The moves from source to target, each with the state before it, and their cost."""
        best = {source: (0, 0, 0)}
        came_from: dict[State, tuple[State, Move]] = {}
        queue = [((0, 0, 0), source)]
        done = set()
        state = source
        while state != target:
            _, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            cost, num_moves, received = best[state]
            for move in moves_from(state, tuple(self._axes), joint=self._joint):
                if move.after in done:
                    continue
                num_bytes = self.received(state, move)
                label = (cost + COSTS[move.op], num_moves + 1, received + num_bytes)
                if move.after not in best or label < best[move.after]:
                    best[move.after] = label
                    came_from[move.after] = (state, move)
                    heapq.heappush(queue, (label, move.after))
        return _path(came_from, source, target), best[target][0]

    def _held_bytes(self, state: State) -> int:
        if state.cuts not in self._held:
            part = Sharding(state.cuts).largest(self._shape, self._axes)
            self._held[state.cuts] = prod(part) * self._itemsize
        return self._held[state.cuts]

    def received(self, before: State, move: Move) -> int:
        """Bytes, as if every part were as large as the largest."""
        held, num_ranks = self._held_bytes(before), prod(self._axes[axis] for axis in move.axes)
        if move.op in LOCAL_OPS:
            return 0
        if move.op == "permute":
            return held
        if move.op == "all_to_all":
            return held * (num_ranks - 1) // num_ranks
        if move.op == "all_reduce":
            return 2 * held * (num_ranks - 1) // num_ranks
        if move.op == "reduce_scatter":
            return self._held_bytes(move.after) * (num_ranks - 1)
        return self._held_bytes(move.after) - held


def _path(
    came_from: dict[State, tuple[State, Move]], source: State, target: State
) -> list[tuple[State, Move]]:
    """Returns the moves from source to target; neighbouring local moves of one op become one."""
    path: list[tuple[State, Move]] = []
    state = target
    while state != source:
        before, move = came_from[state]
        if path and move.op in LOCAL_OPS and path[-1][1].op == move.op:
            after = path.pop()[1]
            move = Move(move.op, move.axes + after.axes, after.after)
        path.append((before, move))
        state = before
    return path[::-1]
