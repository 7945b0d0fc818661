"""The cheapest way from one sharding of a tensor to another: a plan of collectives, and its run.

    moved = redistribute(dtensor, "S(0)[ep,edp]")

    steps = plan("S(0)[ep,edp]", "S(1)[ep]", axes=axes, shape=shape, dtype=dtype)
    local = execute(steps, local, mesh)

The first form works on DTensors, the second on this rank's parts of them.
`sharding_moves.py` has the moves and their costs, `plan_search.py` the search. All ranks find the
same plan: ties go to the one with fewer moves, then fewer bytes, then to the first by the order of
the axes and dims.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from titan_moe.distributed.boxes import Box, exchange_boxes, inside, sizes
from titan_moe.distributed.dtensor import check_divides, mesh_axes, mesh_rank, sharding_of
from titan_moe.distributed.plan_search import Search
from titan_moe.distributed.sharding import Axes, Sharding, group_of
from titan_moe.distributed.sharding_moves import State


class Step(NamedTuple):
    """One move of a plan."""

    op: str
    axes: tuple[str, ...]
    """That take part."""
    before: Sharding
    after: Sharding
    bytes: int
    """Received by the rank that receives most; of an all-reduce over n ranks 2 (n - 1) / n of what
    it sums, as a ring of ranks sends it (Patarasuk and Yuan 2009)."""
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
    cost: int
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
    joint: bool = True,
    peak_bytes: int | None = None,
) -> Plan:
    """The plan of least cost. What was asked before is not searched again.

    Costs and the search take every part to be as large as the largest one; the bytes of a step that
    moves parts of several sizes are counted in the end.

    Args:
        axes: the mesh's axes, outermost first, and their sizes.
        shape: of the whole tensor.
        joint: whether one collective may run over several axes.
        peak_bytes: the most that a rank may hold during any step, its part before and its part
            after together.

    Raises:
        ValueError: a sharding does not fit the shape or the mesh, or no plan stays within
            `peak_bytes`.
    """
    return _plan(
        _sharding(source),
        _sharding(target),
        tuple(axes.items()),
        tuple(shape),
        dtype.itemsize,
        joint,
        peak_bytes,
    )


@lru_cache(maxsize=4096)
def _plan(
    source: Sharding,
    target: Sharding,
    axes: tuple[tuple[str, int], ...],
    shape: tuple[int, ...],
    itemsize: int,
    joint: bool,
    peak_bytes: int | None,
) -> Plan:
    mesh = dict(axes)
    for each in (source, target):
        each.check(shape, mesh)
    # What an axis of one rank does changes nothing.
    real = {axis: size for axis, size in axes if size > 1}
    first, last = (State.of(_over(each, real), len(shape)) for each in (source, target))
    search = Search(real, shape, itemsize, joint)
    path, cost = search.run(first, last, peak_bytes)
    steps = []
    for state, move in path:
        before, after = state.sharding(), move.after.sharding()
        num_bytes = search.received(state, move)
        if move.op in ("all_gather", "all_to_all", "permute") and not all(
            each.divides(shape, real) for each in (before, after)
        ):
            num_bytes = itemsize * _most_received(before, after, shape, real)
        peak = search.peak(state, move)
        steps.append(Step(move.op, move.axes, before, after, num_bytes, peak))
    return Plan(source, target, tuple(steps), cost, mesh, shape)


def _over(sharding: Sharding, axes: Axes) -> Sharding:
    """Returns the sharding restricted to `axes`."""
    cuts = (tuple(axis for axis in cut if axis in axes) for cut in sharding.cuts)
    return Sharding(tuple(cuts), sharding.partial & axes.keys())


def _most_received(before: Sharding, after: Sharding, shape: tuple[int, ...], axes: Axes) -> int:
    """Elements that the rank that receives most does not hold before; for any sizes, by a look at
    every rank of the axes that cut."""
    cutting = {axis for each in (before, after) for cut in each.cuts for axis in cut}
    places = {
        axis: np.arange(axes[axis]).reshape([-1 if other == axis else 1 for other in cutting])
        for axis in cutting
    }
    held, kept = np.array(1), np.array(1)
    for dim, size in enumerate(shape):
        bounds = []
        for each in (before, after):
            start, stop = np.array(0), np.array(size)
            for axis in each.cuts[dim] if dim < len(each.cuts) else ():
                part = -(-(stop - start) // axes[axis])
                start = np.minimum(start + places[axis] * part, stop)
                stop = np.minimum(start + part, stop)
            bounds.append((start, stop))
        (old_start, old_stop), (start, stop) = bounds
        held = held * (stop - start)
        common = np.minimum(stop, old_stop) - np.maximum(start, old_start)
        kept = kept * np.maximum(common, 0)
    return int((held - kept).max())


def _sharding(each: Sharding | str) -> Sharding:
    return Sharding.parse(each) if isinstance(each, str) else each


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

    Collective over the groups of the plan's axes. All-reduces sum in the backend's order, as do
    reduce-scatters of equal parts except on gloo; all others sum in the order of ranks.

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


# --- DTensors ------------------------------------------------------------------------------------


def plan_redistribution(tensor: DTensor, target: Sharding | str, **options: Any) -> Plan:
    """The plan that `redistribute` carries out; print it, or read the bytes of its `steps`.

    `options` are `joint` and `peak_bytes` of `plan`. By default a collective runs over
    several axes at once, unless the world was initialised with a `device_id`: NCCL then splits the
    groups of joined axes off with the help of all ranks.

    Raises:
        ValueError: as `plan` does; for a target that torch has no placements for, or a mesh whose
            ranks do not ascend.
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(f"{type(tensor).__name__} is no DTensor: distribute_tensor makes one")
    mesh, (source, axes) = tensor.device_mesh, sharding_of(tensor)
    if not bool((mesh.mesh.flatten().diff() > 0).all()):
        raise ValueError(f"{mesh} has ranks that do not ascend: torch's groups put them in order")
    joint = dist.group.WORLD.bound_device_id is None  # type: ignore[union-attr]
    options = {"joint": joint, **options}
    steps = plan(source, target, axes=axes, shape=tensor.shape, dtype=tensor.dtype, **options)
    _placements(steps.target, tensor)
    return steps


def redistribute(tensor: DTensor, target: Sharding | str | Plan) -> DTensor:
    """The same tensor under another sharding of its mesh, by the plan of least cost.

    `tensor` may lie on any DeviceMesh, with `Shard` in any order of axes (an explicit `shard_order`
    or `_StridedShard`), `Replicate` and `Partial`. Axes of a mesh without names go by their
    numbers: `"S(0)[1,0]"`. The result has a `_StridedShard` where an axis cuts before one to its
    left in the mesh. A plan of `plan_redistribution` is carried out as it is.

    Differentiable, more than once. The gradient lies as `tensor` does, except that it has copies
    where `tensor` is a partial sum. Collective over the mesh.

    Raises:
        ValueError: as `plan_redistribution` does, or a plan was made for another tensor.
    """
    steps = target if isinstance(target, Plan) else plan_redistribution(tensor, target)
    source, axes = sharding_of(tensor)
    if (steps.source, steps.axes, steps.shape) != (source, axes, tuple(tensor.shape)):
        raise ValueError(
            f"the plan begins with {steps.source} of {list(steps.shape)} on {dict(steps.axes)}, "
            f"and the tensor is {source} of {list(tensor.shape)} on {dict(axes)}"
        )
    return _RedistributeFunction.apply(tensor, steps)


class _RedistributeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, steps: Plan) -> DTensor:
        ctx.source = Sharding(steps.source.cuts)
        if ctx.needs_input_grad[0]:
            _placements(ctx.source, tensor)
        placements = _placements(steps.target, tensor)
        mesh, local = tensor.device_mesh, tensor.to_local()
        if mesh.get_coordinate() is not None:
            local = execute(steps, local, _MeshGroups(mesh)).contiguous()
        strides = torch.empty(tensor.shape, device="meta").stride()
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=tensor.shape, stride=strides
        )

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # type: ignore[override]
        return redistribute(grad, ctx.source), None


def _placements(sharding: Sharding, tensor: DTensor) -> tuple[Placement, ...]:
    """Raises ValueError as `sharding_of` does, which reads them again."""
    axes = mesh_axes(tensor.device_mesh)
    placements = sharding.placements(axes)
    check_divides(sharding, axes, placements, tensor.shape)
    return placements


class _MeshGroups:
    """The axes of any DeviceMesh; groups of several axes are made at their first use."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.axes, self.rank, self._mesh = mesh_axes(mesh), mesh_rank(mesh), mesh

    def group(self, axes: Sequence[str]) -> ProcessGroup:
        if len(axes) == 1:
            return self._mesh.get_group(list(self.axes).index(axes[0]))
        ranks = self._mesh.mesh.flatten()[group_of(self.rank, axes, self.axes)].tolist()
        return _joined_group(dist.group.WORLD, tuple(ranks))


@cache
def _joined_group(world: ProcessGroup, ranks: tuple[int, ...]) -> ProcessGroup:
    if len(ranks) == world.size():
        return world
    return dist.new_group(list(ranks), use_local_synchronization=True)
