"""The cheapest way from one sharding of a tensor to another, as a plan of collectives.

A move is one of the field's collectives over one or several axes at once:

| op | before → after | over |
|---|---|---|
| slice | copies → parts | any axis, which then cuts a dim last |
| to_partial | copies → a sum with one term | any axis: all ranks but its first hold zeros |
| all_gather | parts → copies | the last axes of any dims |
| all_to_all | parts of one dim → of another | the last axes of a dim, which then cut the other last |
| reduce_scatter | sums → parts | axes of the sum, which then cut a dim last |
| all_reduce | sums → copies | axes of the sum |
| permute | parts → the same parts on other ranks | the axes of a dim, in another order |

A plan is found by A* over the shardings that the tensor can have on the mesh (Hart, Nilsson and
Raphael 1968). All ranks find the same one: ties go to the plan with fewer collectives, then fewer
bytes, then to the first by the order of the axes and dims.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, permutations, product
from math import prod
from typing import NamedTuple, Protocol

import torch

from titan_moe.distributed.sharding import Axes, Sharding

OPS = (
    "slice", "to_partial", "all_gather", "all_to_all", "reduce_scatter", "all_reduce", "permute",
)  # fmt: skip
_LOCAL = frozenset({"slice", "to_partial"})


@dataclass(frozen=True)
class Moves:
    """What a plan may use."""

    ops: frozenset[str] = frozenset(OPS)
    joint: bool = True
    """Whether one collective may run over several axes."""


ALL = Moves()


class Costs(Protocol):
    """What a collective costs, in any unit; local moves cost nothing."""

    def cost(self, op: str, axes: Sequence[str], sizes: Sequence[int], num_bytes: int) -> float:
        """`num_bytes`: what a rank receives. The axes are those that take part."""

    def least(self, op: str) -> float:
        """No more than any `cost` of this op."""


class UnitCosts:
    """One number for each op, whatever the tensor's size; as torch 2.13's planner ranks them."""

    _COSTS: Mapping[str, int] = {
        "all_reduce": 4, "all_gather": 2, "reduce_scatter": 2, "all_to_all": 1, "permute": 1,
    }  # fmt: skip

    def cost(self, op: str, axes: Sequence[str], sizes: Sequence[int], num_bytes: int) -> float:
        return self._COSTS.get(op, 0)

    def least(self, op: str) -> float:
        return self._COSTS.get(op, 0)


class Link(NamedTuple):
    """What connects neighbours along an axis."""

    bytes_per_second: float
    latency_s: float


@dataclass(frozen=True)
class LinkCosts:
    """Seconds: a collective over several axes runs at the pace of the slowest of their links."""

    links: Mapping[str, Link]

    def cost(self, op: str, axes: Sequence[str], sizes: Sequence[int], num_bytes: int) -> float:
        if op in _LOCAL:
            return 0.0
        links = [self.links[axis] for axis in axes]
        rate = min(link.bytes_per_second for link in links)
        return max(link.latency_s for link in links) + num_bytes / rate

    def least(self, op: str) -> float:
        return 0.0 if op in _LOCAL else min(link.latency_s for link in self.links.values())


class Step(NamedTuple):
    """One move of a plan."""

    op: str
    axes: tuple[str, ...]
    """That take part."""
    before: Sharding
    after: Sharding
    bytes: int
    """Received by the rank that receives most."""
    peak_bytes: int
    """Held by the rank that holds most while the move runs: its part before and its part after."""

    def __str__(self) -> str:
        return f"{self.op} over {','.join(self.axes)}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Plan:
    """How to get from one sharding to another."""

    source: Sharding
    target: Sharding
    steps: tuple[Step, ...]
    cost: float
    axes: Mapping[str, int] = field(compare=False)
    shape: tuple[int, ...] = field(compare=False)

    @property
    def peak_bytes(self) -> int:
        return max((step.peak_bytes for step in self.steps), default=0)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) or "nothing to do"


def plan(
    source: Sharding | str,
    target: Sharding | str,
    *,
    axes: Axes,
    shape: Sequence[int],
    dtype: torch.dtype,
    costs: Costs | None = None,
    moves: Moves = ALL,
    peak_bytes: int | None = None,
) -> Plan:
    """The plan of least cost.

    Args:
        axes: the mesh's axes, outermost first, and their sizes.
        shape: of the whole tensor.
        costs: `UnitCosts()` if left out.
        peak_bytes: the most that a rank may hold during any step, its part before and its part
            after together.

    Raises:
        ValueError: a sharding does not fit the shape or the mesh, or no plan stays within
            `peak_bytes` or makes do with `moves`.
    """
    source, target = _sharding(source), _sharding(target)
    for each in (source, target):
        each.check(shape, axes)
    search = _Search(dict(axes), tuple(shape), dtype.itemsize, costs or UnitCosts(), moves)
    path, cost = search.run(_state(source, len(shape)), _state(target, len(shape)), peak_bytes)
    return Plan(source, target, tuple(search.step(*each) for each in path), cost, axes, tuple(shape))


def _sharding(each: Sharding | str) -> Sharding:
    return Sharding.parse(each) if isinstance(each, str) else each


# --- the search ----------------------------------------------------------------------------------


class _State(NamedTuple):
    """A sharding as the search hashes and orders it."""

    cuts: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...]


class _Move(NamedTuple):
    op: str
    axes: tuple[str, ...]
    after: _State


def _state(sharding: Sharding, num_dims: int) -> _State:
    cuts = sharding.cuts + ((),) * (num_dims - len(sharding.cuts))
    return _State(cuts, tuple(sorted(sharding.partial)))


class _Search:
    def __init__(
        self, axes: dict[str, int], shape: tuple[int, ...], itemsize: int, costs: Costs, moves: Moves
    ) -> None:
        self._axes, self._shape, self._itemsize = axes, shape, itemsize
        self._costs, self._moves = costs, moves
        self._held: dict[tuple[tuple[str, ...], ...], int] = {}
        least = {op: costs.least(op) for op in OPS}
        self._reduce = min(least["all_reduce"], least["reduce_scatter"])
        self._gather = least["all_gather"]
        self._move = least["all_to_all"]
        self._reorder = min(least["all_gather"], least["all_to_all"], least["permute"])

    def run(
        self, source: _State, target: _State, peak_bytes: int | None
    ) -> tuple[list[tuple[_State, _Move]], float]:
        """The moves from source to target, each with the state before it, and their cost."""
        best = {source: (0.0, 0, 0)}
        came_from: dict[_State, tuple[_State, _Move]] = {}
        queue = [(*self._bound(source, target), 0, source)]
        done = set()
        while queue:
            *_, state = heapq.heappop(queue)
            if state == target:
                return _path(came_from, source, target), best[target][0]
            if state in done:
                continue
            done.add(state)
            cost, num_moves, received = best[state]
            for move in _moves(state, target, tuple(self._axes), self._moves):
                if move.after in done:
                    continue
                num_bytes = self._received(state, move)
                if peak_bytes is not None and self._peak(state, move) > peak_bytes:
                    continue
                sizes = [self._axes[axis] for axis in move.axes]
                label = (
                    cost + self._costs.cost(move.op, move.axes, sizes, num_bytes),
                    num_moves + 1,
                    received + num_bytes,
                )
                if move.after not in best or label < best[move.after]:
                    best[move.after] = label
                    came_from[move.after] = (state, move)
                    least, fewest = self._bound(move.after, target)
                    bound = (label[0] + least, label[1] + fewest, label[2], move.after)
                    heapq.heappush(queue, bound)
        limit = "" if peak_bytes is None else f" with at most {peak_bytes:,} bytes on a rank"
        raise ValueError(
            f"no plan from {_named(source)} to {_named(target)} of {list(self._shape)}{limit} by "
            f"{', '.join(sorted(self._moves.ops))}"
        )

    def step(self, before: _State, move: _Move) -> Step:
        return Step(
            move.op,
            move.axes,
            _named(before),
            _named(move.after),
            self._received(before, move),
            self._peak(before, move),
        )

    def _bound(self, state: _State, target: _State) -> tuple[float, int]:
        """No more than the cost of any way on, and than its number of moves.

        What must be reduced takes a collective. So does what must be gathered; else each dim that
        axes leave for another one takes a collective of its own, or one all-gather for all of them,
        and so does an order that no slice completes. A free axis that is to cut or to be summed
        over takes a local move.
        """
        to = {axis: dim for dim, cut in enumerate(target.cuts) for axis in cut}
        now = {axis: dim for dim, cut in enumerate(state.cuts) for axis in cut}
        cost = 0.0
        num_moves = sum(axis not in now and axis not in state.partial for axis in to)
        num_moves += sum(axis not in now and axis not in state.partial for axis in target.partial)
        if any(axis not in target.partial for axis in state.partial):
            cost, num_moves = self._reduce, num_moves + 1
        if not now.keys() <= to.keys():
            return cost + self._gather, num_moves + 1
        if leaving := len({dim for axis, dim in now.items() if to[axis] != dim}):
            return cost + min(self._gather, leaving * self._move), num_moves + 1
        if any(cut != aim[: len(cut)] for cut, aim in zip(state.cuts, target.cuts, strict=True)):
            return cost + self._reorder, num_moves + 1
        return cost, num_moves

    def _held_bytes(self, state: _State) -> int:
        if state.cuts not in self._held:
            part = Sharding(state.cuts).largest(self._shape, self._axes)
            self._held[state.cuts] = prod(part) * self._itemsize
        return self._held[state.cuts]

    def _received(self, before: _State, move: _Move) -> int:
        held, num_ranks = self._held_bytes(before), prod(self._axes[axis] for axis in move.axes)
        if move.op in _LOCAL:
            return 0
        if move.op == "permute":
            return held
        if move.op == "all_to_all":
            return held * (num_ranks - 1) // num_ranks
        if move.op == "all_reduce":
            return 2 * held * (num_ranks - 1) // num_ranks
        return abs(self._held_bytes(move.after) - held)

    def _peak(self, before: _State, move: _Move) -> int:
        return self._held_bytes(before) + self._held_bytes(move.after)


def _named(state: _State) -> Sharding:
    return Sharding(state.cuts, frozenset(state.partial))


def _path(
    came_from: dict[_State, tuple[_State, _Move]], source: _State, target: _State
) -> list[tuple[_State, _Move]]:
    """Back from the target; neighbouring local moves of one op over different axes become one."""
    path: list[tuple[_State, _Move]] = []
    state = target
    while state != source:
        before, move = came_from[state]
        if path and move.op in _LOCAL and path[-1][1].op == move.op:
            after = path.pop()[1]
            move = _Move(move.op, move.axes + after.axes, after.after)
        path.append((before, move))
        state = before
    return path[::-1]


# --- the moves -----------------------------------------------------------------------------------


def _moves(state: _State, target: _State, axes: tuple[str, ...], moves: Moves) -> Iterator[_Move]:
    """Those that can be part of a plan of least cost. Sums are taken over axes only that the target
    does not sum over, and made only over axes that it does."""
    for move in _rearrangements(state, axes, moves):
        if move.op == "to_partial" and move.axes[0] not in target.partial:
            continue
        if move.op in ("all_reduce", "reduce_scatter") and set(move.axes) & set(target.partial):
            continue
        yield move


@lru_cache(maxsize=65536)
def _rearrangements(state: _State, axes: tuple[str, ...], moves: Moves) -> tuple[_Move, ...]:
    """Every move from a state, in a fixed order."""
    made: list[_Move] = []
    for op in OPS:
        if op in moves.ops:
            found = _MAKERS[op](state, axes)
            made += [move for move in found if moves.joint or len(move.axes) == 1]
    return tuple(made)


def _with_cut(cuts: tuple[tuple[str, ...], ...], dim: int, cut: tuple[str, ...]) -> tuple:
    return (*cuts[:dim], cut, *cuts[dim + 1 :])


def _free(state: _State, axes: tuple[str, ...]) -> list[str]:
    used = {axis for cut in state.cuts for axis in cut} | set(state.partial)
    return [axis for axis in axes if axis not in used]


def _slices(state: _State, axes: tuple[str, ...]) -> Iterator[_Move]:
    # One axis at a time: local moves are free, and joined in the end.
    for axis in _free(state, axes):
        for dim, cut in enumerate(state.cuts):
            after = _State(_with_cut(state.cuts, dim, (*cut, axis)), state.partial)
            yield _Move("slice", (axis,), after)


def _to_partials(state: _State, axes: tuple[str, ...]) -> Iterator[_Move]:
    for axis in _free(state, axes):
        after = _State(state.cuts, tuple(sorted((*state.partial, axis))))
        yield _Move("to_partial", (axis,), after)


def _all_gathers(state: _State, axes: tuple[str, ...]) -> Iterator[_Move]:
    for kept in product(*(range(len(cut) + 1) for cut in state.cuts)):
        gathered = [a for cut, n in zip(state.cuts, kept, strict=True) for a in cut[n:]]
        if gathered:
            cuts = tuple(cut[:n] for cut, n in zip(state.cuts, kept, strict=True))
            yield _Move("all_gather", tuple(gathered), _State(cuts, state.partial))


def _all_to_alls(state: _State, axes: tuple[str, ...]) -> Iterator[_Move]:
    for source, cut in enumerate(state.cuts):
        for first in range(len(cut)):
            for dim, other in enumerate(state.cuts):
                if dim != source:
                    cuts = _with_cut(state.cuts, source, cut[:first])
                    cuts = _with_cut(cuts, dim, other + cut[first:])
                    yield _Move("all_to_all", cut[first:], _State(cuts, state.partial))


def _reduce_scatters(state: _State, axes: tuple[str, ...]) -> Iterator[_Move]:
    for number in range(1, len(state.partial) + 1):
        for chosen in permutations(state.partial, number):
            left = tuple(axis for axis in state.partial if axis not in chosen)
            for dim, cut in enumerate(state.cuts):
                cuts = _with_cut(state.cuts, dim, cut + chosen)
                yield _Move("reduce_scatter", chosen, _State(cuts, left))


def _all_reduces(state: _State, axes: tuple[str, ...]) -> Iterator[_Move]:
    for number in range(1, len(state.partial) + 1):
        for chosen in combinations(state.partial, number):
            left = tuple(axis for axis in state.partial if axis not in chosen)
            yield _Move("all_reduce", chosen, _State(state.cuts, left))


def _permutes(state: _State, axes: tuple[str, ...]) -> Iterator[_Move]:
    for cuts in product(*(permutations(cut) for cut in state.cuts)):
        if cuts != state.cuts:
            moved = tuple(
                axis
                for cut, new in zip(state.cuts, cuts, strict=True)
                if cut != new
                for axis in cut
            )
            yield _Move("permute", moved, _State(cuts, state.partial))


_MAKERS: dict[str, Callable[[_State, tuple[str, ...]], Iterator[_Move]]] = {
    "slice": _slices,
    "to_partial": _to_partials,
    "all_gather": _all_gathers,
    "all_to_all": _all_to_alls,
    "reduce_scatter": _reduce_scatters,
    "all_reduce": _all_reduces,
    "permute": _permutes,
}
