"""`titan_moe.redistribute` on DTensors of any mesh, beside torch's own and beside whole tensors."""

from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

import titan_moe
from tests.support.ordered import EXPLICIT, explicit_spec
from tests.support.planting import plant, right_source
from tests.support.shardings import all_shardings
from titan_moe.distributed.dtensor import local_part, mesh_axes, mesh_rank, sharding_of
from titan_moe.distributed.sharding import Sharding, coordinates
from titan_moe.runtime.ranks import RankError, run_on_ranks


def _whole(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def _laid_out(whole: Tensor, sharding: Sharding, mesh: DeviceMesh, *, explicit: bool) -> DTensor:
    """The tensor under a sharding. Terms of a sum differ between ranks and add up exactly."""
    axes, rank = mesh_axes(mesh), mesh_rank(mesh)
    local = whole[sharding.box(rank, whole.shape, axes)].clone()
    for axis in sorted(sharding.partial):
        place, size = coordinates(rank, axes)[axis], axes[axis]
        terms = [2.0 ** -(2 + number) for number in range(size - 1)]
        local = local * [*terms, 1 - sum(terms)][place]
    if explicit:
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = explicit_spec(Sharding(sharding.cuts), mesh, meta)
        return DTensor(local, spec, requires_grad=False)
    return DTensor.from_local(
        local,
        mesh,
        sharding.placements(axes),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


class Planted(NamedTuple):
    """A line of production code, written wrongly."""

    where: str
    right: str
    wrong: str


def _problems_of_pairs(
    sizes: tuple[int, ...], shape: tuple[int, ...], every: int, bug: Planted | None = None
) -> tuple[list[str], int, int]:
    """What is wrong, how many pairs were tried, and how many of them torch did too. `every`: one of
    so many targets is tried for a source, another one for the next."""
    if bug is not None:
        plant(bug)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("xyz"[: len(sizes)]))
    whole, wrong, tried, beside = _whole(shape), [], 0, 0
    shardings = list(all_shardings(list(mesh_axes(mesh)), len(shape)))
    orders = cycle(shardings)
    for number, source in enumerate(shardings):
        for explicit in (False, True):
            if explicit and (source.partial or not EXPLICIT):
                continue
            for target in shardings[number % every :: every]:
                tensor: Any = _laid_out(whole, source, mesh, explicit=explicit).requires_grad_()
                moved = titan_moe.redistribute(tensor, str(target))
                grad = _laid_out(-whole, next(orders), mesh, explicit=False)
                moved.backward(grad)
                tried += 1
                place = f"{source} -> {target}, explicit order: {explicit}"
                wrong += [f"{place}: {each}" for each in _problems(tensor, moved, whole, target)]
                if not explicit and not target.partial:
                    wrong += [f"{place}: {each}" for each in _beside_torch(tensor, moved, grad)]
                    beside += 1
    return wrong, tried, beside


def _problems(tensor: Any, moved: DTensor, whole: Tensor, target: Sharding) -> list[str]:
    assert tensor.grad is not None
    source, axes = sharding_of(tensor)
    rank = mesh_rank(tensor.device_mesh)
    of_gradient = Sharding(source.cuts)
    right = {
        "sharding": sharding_of(moved) == (target, axes),
        "values": torch.equal(moved.full_tensor(), whole),
        "gradient's sharding": sharding_of(tensor.grad) == (of_gradient, axes),
        "gradient": torch.equal(
            tensor.grad.to_local(), -whole[of_gradient.box(rank, whole.shape, axes)]
        ),
    }
    if not target.partial:
        right["part"] = torch.equal(moved.to_local(), whole[target.box(rank, whole.shape, axes)])
    return [name for name, is_right in right.items() if not is_right]


def _beside_torch(tensor: Any, moved: DTensor, grad: DTensor) -> list[str]:
    """Differences to DTensor.redistribute, gradients included."""
    other: Any = tensor.detach().requires_grad_()
    by_torch = other.redistribute(placements=moved.placements)
    by_torch.backward(grad)
    assert tensor.grad is not None and other.grad is not None
    wrong = []
    for name, one, two in (("values", moved, by_torch), ("gradient", tensor.grad, other.grad)):
        if any(placement.is_partial() for placement in two.placements):
            # Of a sum, given a sum: torch leaves it one, which is the same gradient.
            one, two = one.full_tensor(), two.full_tensor()
        elif one.placements != two.placements:
            wrong.append(f"{name}: {one.placements} and torch's {two.placements}")
        if not torch.equal(local_part(one), local_part(two)):
            wrong.append(f"{name} of torch")
    return wrong


def test_pairs_have_the_values_and_gradients_of_torch_and_of_the_whole() -> None:
    for wrong, tried, beside in run_on_ranks(_problems_of_pairs, 4, (2, 2), (4, 8), 9):
        assert wrong == []
        # 18 shardings, 11 of them without a sum.
        assert (tried, beside) == (18 * 2 + 11 * 2 * EXPLICIT, 22)


def test_a_gradient_that_is_left_as_it_comes_is_caught() -> None:
    bug = Planted(
        "titan_moe.distributed.redistribution:_RedistributeFunction.backward",
        "return redistribute(grad, ctx.source), None",
        "return grad, None",
    )
    right_source(bug)
    # The engine of autograd refuses parts of another shape.
    try:
        found = run_on_ranks(_problems_of_pairs, 4, (2, 2), (4, 8), 18, bug)
    except RankError:
        return
    assert all(wrong for wrong, _, _ in found)


def _refused(run: Callable[[], object]) -> str:
    try:
        run()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _of_other_meshes() -> tuple[list[str], list[str]]:
    """What is wrong, and what refusals say."""
    whole, rank, wrong = _whole((8, 4)), dist.get_rank(), []
    unnamed = init_device_mesh("cpu", (2, 2))
    tensor = distribute_tensor(whole, unnamed, [Shard(1), Replicate()])
    steps = titan_moe.plan_redistribution(tensor, "S(0)[1,0]")
    moved = titan_moe.redistribute(tensor, steps)
    first = [0, 4, 2, 6][rank]
    if not torch.equal(moved.to_local(), whole[first : first + 2]):
        wrong.append("an order on a mesh without names")
    pair = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "b"))
    part = titan_moe.redistribute(distribute_tensor(whole, pair, [Replicate(), Shard(0)]), "R")
    if part.to_local().numel() != (32 if rank < 2 else 0):
        wrong.append("ranks outside of the mesh")
    root: Any = distribute_tensor(whole, unnamed, [Shard(0), Shard(1)]).requires_grad_()
    square = titan_moe.redistribute(root, "R") ** 2
    (once,) = torch.autograd.grad(square.sum(), root, create_graph=True)
    twice: Any
    (twice,) = torch.autograd.grad((once**2).sum(), root)
    if not torch.equal(twice.full_tensor(), 8 * whole):
        wrong.append("the second derivative")
    average = DTensor.from_local(whole, unnamed, [Partial("avg"), Replicate()])
    backwards = DeviceMesh("cpu", [3, 2, 1, 0])
    uneven = distribute_tensor(whole[:5], unnamed, [Replicate(), Replicate()])
    shards = DTensor.from_local(whole, backwards, [Shard(0)], run_check=False)
    return wrong, [
        _refused(lambda: titan_moe.redistribute(average, "R")),
        _refused(lambda: titan_moe.redistribute(whole, "R")),
        _refused(lambda: titan_moe.redistribute(tensor, "S(0)[x]")),
        _refused(lambda: titan_moe.redistribute(shards, "R")),
        _refused(lambda: titan_moe.redistribute(moved, steps)),
        _refused(lambda: titan_moe.redistribute(uneven, "S(0)[1,0]")),
    ]


def test_other_meshes_and_refusals() -> None:
    says = [
        "is no plain sum",
        "Tensor is no DTensor: distribute_tensor makes one",
        "names x; the mesh has the axes 0, 1",
        "ranks that do not ascend",
        "the plan begins with S(1)[0] of [8, 4]",
        "2 does not divide 5",
    ]
    for wrong, refusals in run_on_ranks(_of_other_meshes, 4):
        assert wrong == []
        for said, expected in zip(refusals, says, strict=True):
            assert expected in said
