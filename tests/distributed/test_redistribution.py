"""Plans carried out on gloo ranks, against slices of the whole tensor and against torch."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import titan_moe
from tests.support.planting import Bug, plant, right_source
from tests.support.shardings import all_shardings
from titan_moe.distributed.dtensor import local_part, sharding_of
from titan_moe.distributed.parallel_dims import Axes, coordinates, group_of
from titan_moe.distributed.redistribution import Plan, execute, group_over, plan
from titan_moe.distributed.sharding import Sharding
from titan_moe.distributed.sharding_moves import LOCAL_OPS
from titan_moe.runtime.ranks import RankError, run_on_ranks
from titan_moe.simulate.comm_counter import CommCounter

GRID = {"x": 2, "y": 2}
Pairs = list[tuple[str, str]]


class LiveBytes(TorchDispatchMode):
    """Counts floating storages that operations read or made, after each operation; what a kernel
    or a backend takes for itself is not seen. `peak` is the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten(args)
        if func.namespace == "c10d":
            # Copies, since gloo's threads hold the tensors of a collective for a while after it.
            copies = [each.clone() if isinstance(each, Tensor) else each for each in leaves]
            result = func(*tree_unflatten(copies, spec))
            tree_leaves(result)[-1].wait()
            for each, copy in zip(leaves, copies, strict=True):
                if isinstance(each, Tensor):
                    each.copy_(copy)
        else:
            result = func(*args, **(kwargs or {}))
            leaves += tree_leaves(result)
        for each in leaves:
            if isinstance(each, Tensor) and each.is_floating_point():
                storage = each.untyped_storage()
                self._storages[StorageWeakRef(storage)] = storage.nbytes()
        self._storages = {ref: n for ref, n in self._storages.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._storages.values()))
        return result


def whole_of(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


def part_of(whole: Tensor, sharding: Sharding, rank: int, axes: Axes) -> Tensor:
    """A rank's part; of a sum, a term that no other rank has, all of which add up to the whole."""
    part = whole[sharding.box(rank, whole.shape, axes)].clone()
    place = coordinates(rank, axes)
    terms, number = 1, 0
    for axis in sorted(sharding.partial):
        terms, number = terms * axes[axis], number * axes[axis] + place[axis]
    last = number == terms - 1
    # Powers of two keep the sums exact.
    return part * (2.0 ** -(number if last else number + 1))


def is_whole(whole: Tensor, parts: Sequence[Tensor], sharding: Sharding, axes: Axes) -> bool:
    """Returns whether the ranks' parts make up a tensor under a sharding; terms may be any."""
    for rank, part in enumerate(parts):
        mates = group_of(rank, sorted(sharding.partial), axes)
        total = sum((parts[mate] for mate in mates[1:]), parts[mates[0]])
        if not torch.equal(total, whole[sharding.box(rank, whole.shape, axes)]):
            return False
        copies = [a for a in axes if a not in sharding.partial]
        copies = [a for a in copies if all(a not in cut for cut in sharding.cuts)]
        if not torch.equal(part, parts[group_of(rank, copies, axes)[0]]):
            return False
    return True


def planned(
    source: str, target: str, axes: Axes, shape: tuple[int, ...], *, frugal: bool = False
) -> Plan:
    """The plan of least unit cost, or that of fewest bytes among those that hold least."""
    make = partial(plan, source, target, axes=axes, shape=shape, dtype=torch.float64)
    if not frugal:
        return make()
    try:
        return make(max_bytes=0)
    except ValueError as error:
        least = int(str(error).rpartition(" ")[2].replace(",", ""))
        return make(cost="bytes", max_bytes=least)


def move_all(
    axes: Axes, shape: tuple[int, ...], pairs: Pairs, bug: Bug | None, frugal: bool
) -> list[tuple[Tensor, int, float, int]]:
    """Every pair's plan carried out: this rank's part afterwards, the number of collectives, the
    bytes sent and the most bytes held."""
    if bug is not None:
        plant(bug)
    names, whole, results = tuple(axes), whole_of(shape), []
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=names)
    for source, target in pairs:
        steps = planned(source, target, axes, shape, frugal=frugal)
        part = part_of(whole, steps.source, dist.get_rank(), axes)
        for step in steps.steps:
            group_over(mesh, step.axes)  # Made outside the count.
        counter, live = CommCounter(), LiveBytes()
        counter.groups = {"": ""}  # Without any, a counter counts nothing.
        with counter, live:
            moved = execute(steps, part, mesh)
        calls, sent = map(sum, zip((0, 0.0), *counter.volumes().values(), strict=True))
        results.append((moved, int(calls), sent, live.peak))
    return results


def check(
    axes: Axes, shape: tuple[int, ...], pairs: Pairs, bug: Bug | None = None, frugal: bool = False
) -> None:
    whole, world = whole_of(shape), torch.Size(list(axes.values())).numel()
    of_ranks = run_on_ranks(move_all, world, axes, shape, pairs, bug, frugal)
    for (source, target), results in zip(pairs, zip(*of_ranks, strict=True), strict=True):
        parts, calls, sent, held = zip(*results, strict=True)
        place = f"{source} -> {target} of {shape}"
        assert is_whole(whole, parts, Sharding.parse(target), axes), place
        found = planned(source, target, axes, shape, frugal=frugal)
        assert set(calls) == {sum(step.op not in LOCAL_OPS for step in found.steps)}, place
        assert max(held) == max((step.peak_bytes for step in found.steps), default=0), place
        # Parts of one size are received as they are sent.
        assert shape[0] % 4 or max(sent) == sum(step.bytes for step in found.steps), place


def all_pairs(axes: dict[str, int], num_dims: int) -> Pairs:
    texts = [str(each) for each in all_shardings(list(axes), num_dims)]
    return [(one, other) for one in texts for other in texts]


@pytest.mark.parametrize(("shape", "frugal"), [((4, 8), False), ((5, 3), False), ((5, 3), True)])
def test_every_pair_on_two_by_two_ranks(shape: tuple[int, int], frugal: bool) -> None:
    check(GRID, shape, all_pairs(GRID, 2), frugal=frugal)


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_every_pair_on_eight_ranks(part: int) -> None:
    axes = {"x": 2, "y": 2, "z": 2}
    check(axes, (5, 3), all_pairs(axes, 2)[part::4])


_RUN = "titan_moe.distributed.redistribution:execute"
# Each with a pair that must show it.
BUGS = {
    "order swapped": Bug(
        "titan_moe.distributed.sharding:Sharding.box",
        "for axis in self.cuts[dim] if",
        "for axis in self.cuts[dim][::-1] if",
        "R -> S(0)[x,y]",
    ),
    "wrong innermost axis": Bug(
        "titan_moe.distributed.sharding_moves:_all_gathers",
        "cuts = tuple(cut[:n] for",
        "cuts = tuple(cut[len(cut) - n :] for",
        "S(0)[x,y] -> S(0)[y]",
    ),
    "remainder lost": Bug(
        "titan_moe.distributed.sharding:Sharding.box",
        "each = -(-(last - first) // axes[axis])",
        "each = (last - first) // axes[axis]",
        "R -> S(0)[x]",
    ),
    "sum over other ranks lost": Bug(
        "titan_moe.distributed.boxes:exchange_boxes", ".sum(0)", "[place]", "P[x] -> S(0)[x]"
    ),
    "sum not taken": Bug(
        _RUN, "dist.all_reduce(local, group=group_over(mesh, step.axes))", "pass", "P[x] -> R"
    ),
    "a sum of copies": Bug(_RUN, "if place == 0 else torch.zeros_like(local)", "", "R -> P[x]"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    bug = BUGS[name]
    right_source(bug)
    source, target = bug.caught_on.split(" -> ")
    with pytest.raises((AssertionError, RankError)):
        check(GRID, (5, 3), [(source, target)], bug)


# --- DTensors ------------------------------------------------------------------------------------


def problems_of_dtensors(bug: Bug | None = None) -> list[str]:
    """Every pair of shardings whose target is no sum, beside DTensor.redistribute. With a bug, the
    pairs of two sources."""
    sources = list(all_shardings("xy", 2))
    if bug is not None:
        plant(bug)
        del sources[2:]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    whole, wrong = whole_of((4, 8)), []
    for source in sources:
        for target in (each for each in all_shardings("xy", 2) if not each.partial):
            start = distribute_tensor(whole, mesh, [Replicate(), Replicate()])
            tensor: Any = titan_moe.redistribute(start, source).detach().requires_grad_()
            other: Any = tensor.detach().requires_grad_()
            moved = titan_moe.redistribute(tensor, str(target))
            by_torch = other.redistribute(placements=moved.placements)
            for each in (moved, by_torch):
                each.backward(titan_moe.redistribute(start, target))
            right = [
                sharding_of(moved)[0] == target,
                sharding_of(tensor.grad)[0] == Sharding(source.cuts),
                torch.equal(moved.full_tensor(), whole),
                torch.equal(local_part(moved), local_part(by_torch)),
                torch.equal(tensor.grad.full_tensor(), whole),
            ]
            wrong += [f"{source} -> {target}: {right}"] * (not all(right))
    return wrong


def test_dtensors_have_the_values_and_gradients_of_torch() -> None:
    assert run_on_ranks(problems_of_dtensors, 4) == [[]] * 4


def test_a_gradient_that_is_left_as_it_comes_is_caught() -> None:
    bug = Bug(
        "titan_moe.distributed.redistribution:_RedistributeFunction.backward",
        "return redistribute(grad, back), None",
        "return grad, None",
    )
    right_source(bug)
    # The engine of autograd refuses parts of another shape.
    with pytest.raises((AssertionError, RankError)):
        assert run_on_ranks(problems_of_dtensors, 4, bug) == [[]] * 4


def of_other_meshes() -> list[str]:
    """Moves over an unnamed mesh and over a part of the ranks; returns what refusals say."""
    whole, rank = whole_of((8, 4)), dist.get_rank()
    unnamed = init_device_mesh("cpu", (2, 2))
    tensor = distribute_tensor(whole, unnamed, [Shard(1), Replicate()])
    steps = titan_moe.plan_redistribution(tensor, "S(0)[1,0]")
    moved = titan_moe.redistribute(tensor, steps)
    first = [0, 4, 2, 6][rank]
    assert torch.equal(moved.to_local(), whole[first : first + 2])
    pair = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "b"))
    part = titan_moe.redistribute(distribute_tensor(whole, pair, [Replicate(), Shard(0)]), "R")
    assert part.to_local().numel() == (32 if rank < 2 else 0)
    root: Any = distribute_tensor(whole, unnamed, [Shard(0), Shard(1)]).requires_grad_()
    square = titan_moe.redistribute(root, "R") ** 2
    (once,) = torch.autograd.grad(square.sum(), root, create_graph=True)
    twice: Any
    (twice,) = torch.autograd.grad((once**2).sum(), root)
    assert torch.equal(twice.full_tensor(), 8 * whole)
    backwards = DeviceMesh("cpu", [3, 2, 1, 0])
    uneven = distribute_tensor(whole[:5], unnamed, [Replicate(), Replicate()])
    shards = DTensor.from_local(whole, backwards, [Shard(0)], run_check=False)
    says = []
    for refused, target in [
        (whole, "R"),
        (tensor, "S(0)[x]"),
        (shards, "R"),
        (moved, steps),
        (uneven, "S(0)[1,0]"),
    ]:
        with pytest.raises((TypeError, ValueError)) as error:
            titan_moe.redistribute(refused, target)
        says.append(str(error.value))
    half: Any = distribute_tensor(whole, unnamed, [Shard(0), Replicate()]).requires_grad_()
    steps = titan_moe.plan_redistribution(half, "S(0)[0,1]", cost="bytes", max_bytes=200)
    moved = titan_moe.redistribute(half, steps)
    with pytest.raises(ValueError) as error:
        moved.backward(moved.detach())
    return [*says, str(error.value)]


def test_other_meshes_and_refusals() -> None:
    says = [
        "Tensor is no DTensor: distribute_tensor makes one",
        "names x; the mesh has the axes 0, 1",
        "ranks that do not ascend",
        "the plan begins with S(1)[0] of [8, 4]",
        "2 does not divide 5",
        # 64 bytes become 128, with a buffer of 128 on the way.
        "max_bytes is 200, and every plan from S(0)[0,1] to S(0)[0] of [8, 4] holds more on a "
        "rank: allow at least 320",
    ]
    for refusals in run_on_ranks(of_other_meshes, 4):
        for said, expected in zip(refusals, says, strict=True):
            assert expected in said
