"""Lists the moves from a tensor's sharding, each one collective or one local step, and their costs.

| op | before → after | over |
|---|---|---|
| slice | copies → parts | any axes, which then cut dims last |
| to_partial | copies → a sum with one term | any axes: all their ranks but the first hold zeros |
| all_gather | parts → copies | the last axes of any dims |
| all_to_all | parts of one dim → of another | a dim's last axes, which then cut the other last |
| reduce_scatter | sums → parts | axes of the sum, which then cut a dim last |
| all_reduce | sums → copies | axes of the sum |
| permute | parts → the same parts on other ranks | the axes of a dim, in another order |
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, permutations, product
from typing import NamedTuple

from titan_moe.distributed.sharding import Sharding

LOCAL_OPS = frozenset({"slice", "to_partial"})


COSTS: Mapping[str, int] = {
    "slice": 0, "to_partial": 0,
    "all_reduce": 4, "all_gather": 2, "reduce_scatter": 2, "all_to_all": 1, "permute": 1,
}  # fmt: skip
"""The cost of each op, whatever the tensor's size; as torch 2.13's planner ranks them."""


class State(NamedTuple):
    """A sharding as a search hashes and orders it: an entry of `cuts` for every tensor dim."""

    cuts: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...]

    @classmethod
    def of(cls, sharding: Sharding, num_dims: int) -> "State":
        cuts = sharding.cuts + ((),) * (num_dims - len(sharding.cuts))
        return cls(cuts, tuple(sorted(sharding.partial)))

    def sharding(self) -> Sharding:
        return Sharding(self.cuts, frozenset(self.partial))


class Move(NamedTuple):
    op: str
    axes: tuple[str, ...]
    """The mesh axes that take part."""
    after: State


def moves_from(state: State, axes: tuple[str, ...], *, joint: bool) -> Iterator[Move]:
    """Yields every move from a state, in a fixed order.

    Args:
        axes: all of the mesh.
        joint: whether one collective may run over several axes.
    """
    for make in _MAKERS:
        for move in make(state, axes):
            if joint or len(move.axes) == 1 or move.op in LOCAL_OPS:
                yield move


def _with_cut(cuts: tuple[tuple[str, ...], ...], dim: int, cut: tuple[str, ...]) -> tuple:
    return (*cuts[:dim], cut, *cuts[dim + 1 :])


def _free(state: State, axes: tuple[str, ...]) -> list[str]:
    used = {axis for cut in state.cuts for axis in cut} | set(state.partial)
    return [axis for axis in axes if axis not in used]


def _slices(state: State, axes: tuple[str, ...], first: int = 0) -> Iterator[Move]:
    # Dims in ascending order, so that no two slices have one result.
    for dim in range(first, len(state.cuts)):
        for axis in _free(state, axes):
            after = State(_with_cut(state.cuts, dim, (*state.cuts[dim], axis)), state.partial)
            yield Move("slice", (axis,), after)
            for more in _slices(after, axes, dim):
                yield Move("slice", (axis, *more.axes), more.after)


def _to_partials(state: State, axes: tuple[str, ...]) -> Iterator[Move]:
    free = _free(state, axes)
    for number in range(1, len(free) + 1):
        for chosen in combinations(free, number):
            after = State(state.cuts, tuple(sorted((*state.partial, *chosen))))
            yield Move("to_partial", chosen, after)


def _all_gathers(state: State, axes: tuple[str, ...]) -> Iterator[Move]:
    for kept in product(*(range(len(cut) + 1) for cut in state.cuts)):
        gathered = [a for cut, n in zip(state.cuts, kept, strict=True) for a in cut[n:]]
        if gathered:
            cuts = tuple(cut[:n] for cut, n in zip(state.cuts, kept, strict=True))
            yield Move("all_gather", tuple(gathered), State(cuts, state.partial))


def _all_to_alls(state: State, axes: tuple[str, ...]) -> Iterator[Move]:
    for source, cut in enumerate(state.cuts):
        for first in range(len(cut)):
            for dim, other in enumerate(state.cuts):
                if dim != source:
                    cuts = _with_cut(state.cuts, source, cut[:first])
                    cuts = _with_cut(cuts, dim, other + cut[first:])
                    yield Move("all_to_all", cut[first:], State(cuts, state.partial))


def _reduce_scatters(state: State, axes: tuple[str, ...]) -> Iterator[Move]:
    for number in range(1, len(state.partial) + 1):
        for chosen in permutations(state.partial, number):
            left = tuple(axis for axis in state.partial if axis not in chosen)
            for dim, cut in enumerate(state.cuts):
                cuts = _with_cut(state.cuts, dim, cut + chosen)
                yield Move("reduce_scatter", chosen, State(cuts, left))


def _all_reduces(state: State, axes: tuple[str, ...]) -> Iterator[Move]:
    for number in range(1, len(state.partial) + 1):
        for chosen in combinations(state.partial, number):
            left = tuple(axis for axis in state.partial if axis not in chosen)
            yield Move("all_reduce", chosen, State(state.cuts, left))


def _permutes(state: State, axes: tuple[str, ...]) -> Iterator[Move]:
    orders = [[(new, _reordered(cut, new)) for new in permutations(cut)] for cut in state.cuts]
    for chosen in product(*orders):
        if moved := tuple(axis for _, axes_moved in chosen for axis in axes_moved):
            yield Move("permute", moved, State(tuple(new for new, _ in chosen), state.partial))


def _reordered(cut: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes that another order moves: all after the first that stay."""
    same = next((i for i, (a, b) in enumerate(zip(cut, new, strict=True)) if a != b), len(cut))
    return cut[same:]


_MAKERS: tuple[Callable[[State, tuple[str, ...]], Iterator[Move]], ...] = (
    _slices, _to_partials, _all_gathers, _all_to_alls, _reduce_scatters, _all_reduces, _permutes,
)  # fmt: skip
