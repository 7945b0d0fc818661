"""The plan of least cost, by A* over the shardings that a tensor can have on a mesh (Hart, Nilsson
and Raphael 1968)."""

import heapq
from math import prod

from titan_moe.distributed.sharding import Sharding
from titan_moe.distributed.sharding_moves import (
    COSTS,
    LOCAL_OPS,
    Move,
    Moves,
    State,
    moves_from,
)


class Search:
    def __init__(
        self,
        axes: dict[str, int],
        shape: tuple[int, ...],
        itemsize: int,
        moves: Moves,
    ) -> None:
        self._axes, self._shape, self._itemsize = axes, shape, itemsize
        self._moves = moves
        self._held: dict[tuple[tuple[str, ...], ...], int] = {}

    def run(
        self, source: State, target: State, peak_bytes: int | None
    ) -> tuple[list[tuple[State, Move]], int]:
        """The moves from source to target, each with the state before it, and their cost."""
        best = {source: (0, 0, 0)}
        came_from: dict[State, tuple[State, Move]] = {}
        queue = [(*self.bound(source, target), 0, source)]
        done = set()
        while queue:
            *_, state = heapq.heappop(queue)
            if state == target:
                return _path(came_from, source, target), best[target][0]
            if state in done:
                continue
            done.add(state)
            cost, num_moves, received = best[state]
            for move in moves_from(state, tuple(self._axes), self._moves):
                if move.after in done or not _helps(move, target):
                    continue
                num_bytes = self.received(state, move)
                if peak_bytes is not None and self.peak(state, move) > peak_bytes:
                    continue
                label = (cost + COSTS[move.op], num_moves + 1, received + num_bytes)
                if move.after not in best or label < best[move.after]:
                    best[move.after] = label
                    came_from[move.after] = (state, move)
                    least, fewest = self.bound(move.after, target)
                    bound = (label[0] + least, label[1] + fewest, label[2], move.after)
                    heapq.heappush(queue, bound)
        limit = "" if peak_bytes is None else f" with at most {peak_bytes:,} bytes on a rank"
        raise ValueError(
            f"no plan from {source.sharding()} to {target.sharding()} of {list(self._shape)}"
            f"{limit} by {', '.join(sorted(self._moves.ops))}"
        )

    def bound(self, state: State, target: State) -> tuple[int, int]:
        """No more than the cost of any way on, and than its number of moves.

        A free axis that is to cut or to be summed over takes a local move. Of a sum that has to be
        taken, see `_reducing`.
        """
        to = {axis: dim for dim, cut in enumerate(target.cuts) for axis in cut}
        now = {axis: dim for dim, cut in enumerate(state.cuts) for axis in cut}
        wanted = (*to, *target.partial)
        local = sum(axis not in now and axis not in state.partial for axis in wanted)
        summed = [axis for axis in state.partial if axis not in target.partial]
        cost, num_moves = self._rearranging(state, target, now, to)
        if not summed:
            return cost, local + num_moves
        return self._reducing(summed, cost, now, to), local + num_moves + 1

    def _rearranging(
        self, state: State, target: State, now: dict[str, int], to: dict[str, int]
    ) -> tuple[int, int]:
        """For the axes that cut already.

        What must be copied takes an all-gather. Else an all-to-all takes axes out of one dim and
        into one: there are as many as dims that axes leave, or come to; or one all-gather for all.
        Else an order that no slice completes takes a collective.
        """
        if not now.keys() <= to.keys():
            return COSTS["all_gather"], 1
        if moving := [(dim, to[axis]) for axis, dim in now.items() if to[axis] != dim]:
            number = max(len(set(dims)) for dims in zip(*moving, strict=True))
            return min(COSTS["all_gather"], number * COSTS["all_to_all"]), 1
        if any(cut != aim[: len(cut)] for cut, aim in zip(state.cuts, target.cuts, strict=True)):
            return COSTS["permute"], 1
        return 0, 0

    def _reducing(
        self, summed: list[str], rearranging: int, now: dict[str, int], to: dict[str, int]
    ) -> int:
        """For the axes of a sum too, which has to be taken: by an all-reduce, or by reduce-scatters
        alone. Then each dim that axes come to takes a reduce-scatter or an all-to-all of its own,
        or there is an all-gather; as there is where the sum is to be copied."""
        gathered = any(axis not in to for axis in summed)
        dims = {to[axis] for axis in summed if axis in to}
        dims |= {to[axis] for axis, dim in now.items() if to.get(axis, dim) != dim}
        further = (len(dims) - 1) * min(COSTS["reduce_scatter"], COSTS["all_to_all"])
        others = COSTS["all_gather"] if gathered else min(COSTS["all_gather"], further)
        return min(
            COSTS["all_reduce"] + rearranging, COSTS["reduce_scatter"] + max(rearranging, others)
        )

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

    def peak(self, before: State, move: Move) -> int:
        return self._held_bytes(before) + self._held_bytes(move.after)


def _path(
    came_from: dict[State, tuple[State, Move]], source: State, target: State
) -> list[tuple[State, Move]]:
    """Back from the target; neighbouring local moves of one op over different axes become one."""
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


def _helps(move: Move, target: State) -> bool:
    """Whether a plan of least cost can have it: sums are taken over axes only that the target does
    not sum over."""
    reduces = move.op in ("all_reduce", "reduce_scatter")
    return not (reduces and set(move.axes) & set(target.partial))
