"""The cheapest way from one sharding of a tensor to another: a plan of collectives, and its run.

    steps = plan("S(0)[ep,edp]", "S(1)[ep]", axes=axes, shape=shape, dtype=dtype)
    local = execute(steps, local, mesh)

`sharding_moves.py` has the moves. A plan is found by A* over the shardings that the tensor can have
on the mesh (Hart, Nilsson and Raphael 1968). All ranks find the same one: ties go to the plan with
fewer moves, then fewer bytes, then to the first by the order of the axes and dims.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.distributed.boxes import Box, exchange_boxes, inside, sizes
from titan_moe.distributed.sharding import Axes, Sharding, group_of
from titan_moe.distributed.sharding_moves import LOCAL_OPS, OPS, Move, Moves, State, moves_from

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
        if op in LOCAL_OPS:
            return 0.0
        links = [self.links[axis] for axis in axes]
        rate = min(link.bytes_per_second for link in links)
        return max(link.latency_s for link in links) + num_bytes / rate

    def least(self, op: str) -> float:
        return 0.0 if op in LOCAL_OPS else min(link.latency_s for link in self.links.values())


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
    path, cost = search.run(State.of(source, len(shape)), State.of(target, len(shape)), peak_bytes)
    return Plan(
        source, target, tuple(search.step(*each) for each in path), cost, axes, tuple(shape)
    )


def _sharding(each: Sharding | str) -> Sharding:
    return Sharding.parse(each) if isinstance(each, str) else each


# --- the search ----------------------------------------------------------------------------------


class _Search:
    def __init__(
        self,
        axes: dict[str, int],
        shape: tuple[int, ...],
        itemsize: int,
        costs: Costs,
        moves: Moves,
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
        self, source: State, target: State, peak_bytes: int | None
    ) -> tuple[list[tuple[State, Move]], float]:
        """The moves from source to target, each with the state before it, and their cost."""
        best = {source: (0.0, 0, 0)}
        came_from: dict[State, tuple[State, Move]] = {}
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
            for move in moves_from(state, tuple(self._axes), self._moves):
                if move.after in done or not _helps(move, target):
                    continue
                num_bytes = self._received(state, move)
                if peak_bytes is not None and self._peak(state, move) > peak_bytes:
                    continue
                degrees = [self._axes[axis] for axis in move.axes]
                label = (
                    cost + self._costs.cost(move.op, move.axes, degrees, num_bytes),
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
            f"no plan from {source.sharding()} to {target.sharding()} of {list(self._shape)}"
            f"{limit} by {', '.join(sorted(self._moves.ops))}"
        )

    def step(self, before: State, move: Move) -> Step:
        return Step(
            move.op,
            move.axes,
            before.sharding(),
            move.after.sharding(),
            self._received(before, move),
            self._peak(before, move),
        )

    def _bound(self, state: State, target: State) -> tuple[float, int]:
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

    def _held_bytes(self, state: State) -> int:
        if state.cuts not in self._held:
            part = Sharding(state.cuts).largest(self._shape, self._axes)
            self._held[state.cuts] = prod(part) * self._itemsize
        return self._held[state.cuts]

    def _received(self, before: State, move: Move) -> int:
        held, num_ranks = self._held_bytes(before), prod(self._axes[axis] for axis in move.axes)
        if move.op in LOCAL_OPS:
            return 0
        if move.op == "permute":
            return held
        if move.op == "all_to_all":
            return held * (num_ranks - 1) // num_ranks
        if move.op == "all_reduce":
            return 2 * held * (num_ranks - 1) // num_ranks
        return abs(self._held_bytes(move.after) - held)

    def _peak(self, before: State, move: Move) -> int:
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


# --- running a plan ------------------------------------------------------------------------------


class AxisGroups(Protocol):
    """A mesh, as far as a plan needs it."""

    axes: Axes
    rank: int

    def group(self, axes: Sequence[str]) -> ProcessGroup:
        """The ranks that differ from this one along these axes only, in ascending order."""


def execute(steps: Plan, local: Tensor, mesh: AxisGroups) -> Tensor:
    """This rank's part under the plan's target, from its part under the plan's source.

    Differentiable. Gradients lie as the tensor does, but for copies and sums, which change places:
    the gradient of a tensor that ranks hold copies of is a sum over them that has not been taken,
    and the gradient of such a sum is the same on all of its ranks. The backward runs each step's
    transpose, in reverse: a reduce-scatter for an all-gather, zeros around a slice.

    Collective over the groups of the plan's axes. An all-reduce sums in the backend's order; sums
    of a reduce-scatter are taken in the order of ranks.

    Raises:
        ValueError: `local` has not the shape of this rank's part.
    """
    box = steps.source.box(mesh.rank, steps.shape, mesh.axes)
    if tuple(local.shape) != sizes(box):
        raise ValueError(
            f"rank {mesh.rank} holds {list(local.shape)}, not {list(sizes(box))}: its part of "
            f"{list(steps.shape)} under {steps.source}"
        )
    for step in steps.steps:
        local = _StepFunction.apply(local, step, steps.shape, mesh)
    return local


class _StepFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, step: Step, shape: tuple[int, ...], mesh: AxisGroups
    ) -> Tensor:
        ctx.run = step, shape, mesh
        run = _Run(step.axes, step.before, step.after, shape, mesh)
        if step.op == "slice":
            return run.sliced(local)
        if step.op == "to_partial":
            return run.first_only(local)
        if step.op == "all_reduce":
            return run.summed(local)
        return run.exchanged(local, add=step.op == "reduce_scatter")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        step, shape, mesh = ctx.run
        run = _Run(step.axes, step.after, step.before, shape, mesh)
        if step.op == "slice":
            grad = run.embedded(grad)
        elif step.op == "to_partial":
            grad = run.first_only(grad)
        elif step.op == "all_reduce":
            grad = run.summed(grad)
        else:
            grad = run.exchanged(grad, add=step.op == "all_gather")
        return grad, None, None, None


class _Run(NamedTuple):
    """One move of this rank's part, from one place in the whole tensor to another."""

    axes: tuple[str, ...]
    before: Sharding
    after: Sharding
    shape: tuple[int, ...]
    mesh: AxisGroups

    def sliced(self, local: Tensor) -> Tensor:
        return local[inside(self._box(self.after), self._box(self.before))].clone()

    def embedded(self, local: Tensor) -> Tensor:
        """Zeros around it."""
        mine, wanted = self._box(self.before), self._box(self.after)
        whole = local.new_zeros(sizes(wanted))
        whole[inside(mine, wanted)] = local
        return whole

    def first_only(self, local: Tensor) -> Tensor:
        members = group_of(self.mesh.rank, self.axes, self.mesh.axes)
        return local.clone() if self.mesh.rank == members[0] else torch.zeros_like(local)

    def summed(self, local: Tensor) -> Tensor:
        local = local.clone()
        dist.all_reduce(local, group=self.mesh.group(self.axes))
        return local

    def exchanged(self, local: Tensor, *, add: bool) -> Tensor:
        """Each rank of the axes sends to each other one what that holds afterwards; `add`: they all
        hold terms of it, else each a piece."""
        members = group_of(self.mesh.rank, self.axes, self.mesh.axes)
        return exchange_boxes(
            local,
            [self._box(self.before, rank) for rank in members],
            [self._box(self.after, rank) for rank in members],
            place=members.index(self.mesh.rank),
            group=self.mesh.group(self.axes),
            add=add,
        )

    def _box(self, sharding: Sharding, rank: int | None = None) -> Box:
        return sharding.box(self.mesh.rank if rank is None else rank, self.shape, self.mesh.axes)
