"""The cheapest way from one sharding of a tensor to another: a plan of collectives, and its run.

    moved = redistribute(dtensor, "S(0)[ep,edp]")

`sharding_moves.py` has the moves and their costs, `plan_search.py` the search. All ranks find the
same plan: of plans of one unit cost that with fewer moves, then fewer bytes; of plans of one cost
by another measure that of less unit cost, then fewer moves; then the first by the order of the axes
and dims.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from titan_moe.distributed.boxes import exchange_boxes, inside
from titan_moe.distributed.dtensor import check_divides, mesh_axes, mesh_rank, sharding_of
from titan_moe.distributed.parallel_dims import Axes, group_of
from titan_moe.distributed.plan_search import Cost, Search
from titan_moe.distributed.process_groups import ProcessGroups, program_groups
from titan_moe.distributed.sharding import Sharding
from titan_moe.distributed.sharding_moves import State


class Step(NamedTuple):
    """One move of a plan."""

    op: str
    axes: tuple[str, ...]
    """The mesh axes that take part."""
    before: Sharding
    after: Sharding
    bytes: int
    """Received by the rank that receives most; of an all-reduce over n ranks 2 (n - 1) / n of what
    it sums, as a ring of ranks sends it (Patarasuk and Yuan 2009)."""
    peak_bytes: int
    """Held at most while the move runs, by the rank that holds most: the plan's source, the parts
    before and after the move, and buffers, but the backend's own. A reduce-scatter of equal parts
    takes one buffer less, except on gloo; a part that is not contiguous a copy more."""

    def __str__(self) -> str:
        return f"{self.op} over {','.join(self.axes)}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Plan:
    """Holds the steps from one sharding to another."""

    source: Sharding
    target: Sharding
    steps: tuple[Step, ...]
    cost: float
    """The sum over the steps, by `cost_kind`."""
    cost_kind: Cost
    max_bytes: int | None
    axes: Mapping[str, int] = field(compare=False)
    shape: tuple[int, ...] = field(compare=False)

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
    cost: Cost = "unit",
    max_bytes: int | None = None,
) -> Plan:
    """Returns the plan of least cost. What was asked before is not searched again.

    Args:
        axes: the mesh's axes, outermost first, and their sizes.
        shape: of the whole tensor.
        joint: whether one collective may run over several axes.
        cost: what is least: the sum of `COSTS`, that of the steps' bytes, or that of a function's
            results; see `CostFunction`.
        max_bytes: bounds every step's `peak_bytes`.

    Raises ValueError where a sharding does not fit the shape or the mesh, and if every plan holds
    more than `max_bytes`.
    """
    if cost not in ("unit", "bytes") and not callable(cost):
        raise ValueError(f"cost is {cost!r}: write 'unit' or 'bytes', or pass a function")
    return _plan(
        _sharding(source), _sharding(target), tuple(axes.items()), tuple(shape), dtype,
        joint, cost, max_bytes,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _plan(
    source: Sharding,
    target: Sharding,
    axes: tuple[tuple[str, int], ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    joint: bool,
    cost: Cost,
    max_bytes: int | None,
) -> Plan:
    mesh = dict(axes)
    for each in (source, target):
        each.check(shape, mesh)
    # An axis of one rank changes nothing.
    real = {axis: size for axis, size in axes if size > 1}
    first, last = (State.of(_over(each, real), len(shape)) for each in (source, target))
    search = Search(real, shape, dtype, first, joint)
    found = search.run(last, cost, inf if max_bytes is None else max_bytes)
    if found is None:
        least, _ = search.run(last, "peak", inf) or (0, ())
        raise ValueError(
            f"max_bytes is {max_bytes:,}, and every plan from {source} to {target} of "
            f"{list(shape)} holds more on a rank: allow at least {least:,}"
        )
    steps = []
    for state, move in found[1]:
        numbers = search.received(state, move), search.peak(state, move)
        steps.append(Step(*move[:2], state.sharding(), move.after.sharding(), *numbers))
    return Plan(source, target, tuple(steps), found[0], cost, max_bytes, mesh, shape)


def _over(sharding: Sharding, axes: Axes) -> Sharding:
    """Returns the sharding restricted to `axes`."""
    cuts = (tuple(axis for axis in cut if axis in axes) for cut in sharding.cuts)
    return Sharding(tuple(cuts), sharding.partial & axes.keys())


def _sharding(each: Sharding | str) -> Sharding:
    return Sharding.parse(each) if isinstance(each, str) else each


# --- running a plan ------------------------------------------------------------------------------


def group_over(mesh: DeviceMesh, axes: Sequence[str]) -> ProcessGroup:
    """Returns the group of the ranks that differ from this one along these axes only, in ascending
    order. A group of several axes is the program's, made at its first use."""
    if len(axes) == 1:
        return mesh.get_group(list(mesh_axes(mesh)).index(axes[0]))
    ranks = mesh.mesh.flatten()[group_of(mesh_rank(mesh), axes, mesh_axes(mesh))].tolist()
    groups = program_groups().setdefault(mesh.device_type, ProcessGroups(device=mesh.device_type))
    return groups.get(tuple(ranks), (False, None), ",".join(axes))


def execute(steps: Plan, local: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's part under the plan's target, from its part under the plan's source. Has
    no gradient.

    Collective over the groups of the plan's axes. All-reduces sum in the backend's order, as do
    reduce-scatters of equal parts except on gloo; all others sum in the order of ranks.
    """
    axes, own = mesh_axes(mesh), mesh_rank(mesh)
    for step in steps.steps:
        members = group_of(own, step.axes, axes)
        place = members.index(own)
        before, after = (
            [each.box(rank, steps.shape, axes) for rank in members]
            for each in (step.before, step.after)
        )
        if step.op == "slice":
            local = local[inside(after[place], before[place])].clone()
        elif step.op == "to_partial":
            local = local.clone() if place == 0 else torch.zeros_like(local)
        elif step.op == "all_reduce":
            local = local.clone()
            dist.all_reduce(local, group=group_over(mesh, step.axes))
        else:
            # With add, what arrives are terms of a sum, else shards.
            local = exchange_boxes(
                *(local, before, after),
                place=place,
                group=group_over(mesh, step.axes),
                add=step.op == "reduce_scatter",
            )
    return local


# --- DTensors ------------------------------------------------------------------------------------


def plan_redistribution(
    tensor: DTensor, target: Sharding | str, *, cost: Cost = "unit", max_bytes: int | None = None
) -> Plan:
    """Returns the plan that `redistribute` carries out; print it, or read the bytes of its `steps`.
    `cost` and `max_bytes` are those of `plan`.

    A collective runs over several axes at once, unless the world was initialised with a `device_id`
    and the mesh lacks some of its ranks: NCCL then splits a group off with the help of all ranks.

    Raises:
        ValueError: as `plan` does; for a target that torch has no placements for, or a mesh whose
            ranks do not ascend.
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(f"{type(tensor).__name__} is no DTensor: distribute_tensor makes one")
    mesh, (source, axes) = tensor.device_mesh, sharding_of(tensor)
    if not bool((mesh.mesh.flatten().diff() > 0).all()):
        raise ValueError(f"{mesh} has ranks that do not ascend: torch's groups put them in order")
    world: Any = dist.group.WORLD
    joint = world.bound_device_id is None or mesh.size() == world.size()
    options: Any = {"joint": joint, "cost": cost, "max_bytes": max_bytes}
    steps = plan(source, target, axes=axes, shape=tensor.shape, dtype=tensor.dtype, **options)
    _placements(steps.target, tensor)
    return steps


def redistribute(tensor: DTensor, target: Sharding | str | Plan) -> DTensor:
    """Returns the same tensor under another sharding of its mesh, by the plan of least cost.

    `tensor` may lie on any DeviceMesh, with `Shard` in any order of axes (an explicit `shard_order`
    or `_StridedShard`), `Replicate` and `Partial`. Axes of a mesh without names go by their
    numbers: `"S(0)[1,0]"`. The result has a `_StridedShard` where an axis cuts before one to its
    left in the mesh. A plan of `plan_redistribution` is carried out as it is.

    Differentiable, more than once. The gradient lies as `tensor` does, except that it has copies
    where `tensor` is a partial sum; its plan has the cost and the bound of this one. Collective
    over the mesh.

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
        ctx.source, ctx.steps = Sharding(steps.source.cuts), steps
        if ctx.needs_input_grad[0]:
            _placements(ctx.source, tensor)
        placements = _placements(steps.target, tensor)
        mesh, local = tensor.device_mesh, tensor.to_local()
        if mesh.get_coordinate() is not None:
            local = execute(steps, local, mesh).contiguous()
        strides = torch.empty(tensor.shape, device="meta").stride()
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=tensor.shape, stride=strides
        )

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # type: ignore[override]
        cost, max_bytes = ctx.steps.cost_kind, ctx.steps.max_bytes
        back = plan_redistribution(grad, ctx.source, cost=cost, max_bytes=max_bytes)
        return redistribute(grad, back), None


def _placements(sharding: Sharding, tensor: DTensor) -> tuple[Placement, ...]:
    """Returns the placements of a sharding. Raises ValueError for those that `sharding_of`
    refuses."""
    axes = mesh_axes(tensor.device_mesh)
    placements = sharding.placements(axes)
    check_divides(sharding, axes, placements, tensor.shape)
    return placements
