"""Plans carried out on gloo ranks, forward and backward, against slices of the whole tensor."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.support.planting import plant, right_source
from tests.support.shardings import all_shardings
from titan_moe.distributed.redistribution import Step, execute, plan
from titan_moe.distributed.sharding import Axes, Sharding, coordinates, group_of
from titan_moe.distributed.sharding_moves import LOCAL_OPS
from titan_moe.runtime.ranks import RankError, run_on_ranks
from titan_moe.simulate.comm_counter import CommCounter, arguments_of
from titan_moe.simulate.comm_counter import group_of as group_of_call


class Mesh:
    """Groups of joined axes, made when they are first asked for, by all of their ranks at once."""

    def __init__(self, axes: Axes) -> None:
        self.axes, self.rank = axes, dist.get_rank()
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}

    def group(self, axes: Sequence[str]) -> ProcessGroup:
        ranks = tuple(group_of(self.rank, axes, self.axes))
        if ranks not in self._groups:
            group = dist.new_group(list(ranks), use_local_synchronization=True)
            self._groups[ranks] = group
        return self._groups[ranks]


class Call(NamedTuple):
    """A collective, as this rank sees it."""

    ranks: tuple[int, ...]
    received: float
    """Bytes."""
    op: str


class Counter(CommCounter):
    """Bytes that come to this rank rather than those that leave it, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = {"": ""}
        self.calls: list[Call] = []

    def count(self, func: Any, args: tuple) -> None:
        named = arguments_of(func, args)
        if func.__name__.startswith("wait_tensor"):
            return
        group, name = group_of_call(named), func.__name__.partition(".")[0]
        if name == "alltoall_base_":
            rows = named["output_split_sizes"]
            received: float = named["output"].itemsize * (sum(rows) - rows[group.rank()])
        elif name in ("allgather_", "all_gather_into_tensor"):
            own = named["input"] if "input" in named else named["input_tensors"][0]
            received = own.nbytes * (group.size() - 1)
        elif name == "reduce_scatter_tensor":
            received = named["input"].nbytes * (group.size() - 1) / group.size()
        else:
            assert name == "allreduce_", f"{name} is no plan's"
            received = 2 * named["tensors"][0].nbytes * (group.size() - 1) / group.size()
        self.calls.append(Call(tuple(dist.get_process_group_ranks(group)), received, name))


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


def gradient_of(sharding: Sharding, axes: Axes) -> Sharding:
    """Copies and sums change places."""
    named = {axis for cut in sharding.cuts for axis in cut} | sharding.partial
    return Sharding(sharding.cuts, frozenset(axis for axis in axes if axis not in named))


def is_whole(whole: Tensor, parts: list[Tensor], sharding: Sharding, axes: Axes) -> bool:
    """Whether the ranks' parts are those of a tensor under a sharding; terms in any division."""
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


class Moved(NamedTuple):
    """What a rank has of a pair of shardings."""

    part: Tensor
    """Its part afterwards."""
    grad: Tensor
    """Of its part before."""
    forward: list[Call]
    backward: list[Call]


class Planted(NamedTuple):
    """A line of production code, written wrongly, and pairs that must show it."""

    where: str
    right: str
    wrong: str
    pairs: list[tuple[str, str]]
    shape: tuple[int, ...] = (4, 8)


def move_all(
    axes: dict[str, int],
    shape: tuple[int, ...],
    pairs: list[tuple[str, str]],
    bug: Planted | None = None,
) -> list[Moved]:
    """Every pair's plan carried out on this rank."""
    if bug is not None:
        plant(bug)
    mesh, results = Mesh(axes), []
    whole = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)
    for source, target in pairs:
        steps = plan(source, target, axes=axes, shape=shape, dtype=whole.dtype)
        for step in steps.steps:
            mesh.group(step.axes)  # Made outside the count.
        local = part_of(whole, steps.source, mesh.rank, axes).requires_grad_()
        forward, backward = Counter(), Counter()
        with forward:
            moved = execute(steps, local, mesh)
        with backward:
            moved.backward(part_of(-whole, gradient_of(steps.target, axes), mesh.rank, axes))
        assert local.grad is not None
        results.append(Moved(moved.detach(), local.grad, forward.calls, backward.calls))
    return results


def check(
    axes: dict[str, int],
    shape: tuple[int, ...],
    pairs: list[tuple[str, str]],
    bug: Planted | None = None,
) -> None:
    whole = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)
    world = torch.Size(list(axes.values())).numel()
    of_ranks = run_on_ranks(move_all, world, axes, shape, pairs, bug)
    for (source, target), results in zip(pairs, zip(*of_ranks, strict=True), strict=True):
        parts, grads, forward, backward = map(list, zip(*results, strict=True))
        place = f"{source} -> {target} of {shape}"
        assert is_whole(whole, parts, Sharding.parse(target), axes), place
        of_gradient = gradient_of(Sharding.parse(source), axes)
        assert is_whole(-whole, grads, of_gradient, axes), f"gradient of {place}"
        steps = plan(source, target, axes=axes, shape=shape, dtype=whole.dtype).steps
        steps = tuple(step for step in steps if step.op not in LOCAL_OPS)
        check_calls(steps, axes, forward, place)
        for calls, back in zip(forward, backward, strict=True):
            groups = [call.ranks for call in calls]
            assert [call.ranks for call in back] == groups[::-1], f"backward of {place}"


def check_calls(
    steps: tuple[Step, ...], axes: dict[str, int], of_ranks: list[list[Call]], place: str
) -> None:
    """One collective for each step, over its group, and its bytes to the rank that gets most."""
    for rank, calls in enumerate(of_ranks):
        wanted = [tuple(group_of(rank, step.axes, axes)) for step in steps]
        assert [call.ranks for call in calls] == wanted, f"rank {rank} of {place}"
    for number, step in enumerate(steps):
        most = max(calls[number].received for calls in of_ranks)
        assert int(most) == step.bytes, f"{step} of {place}"


def all_pairs(axes: dict[str, int], num_dims: int) -> list[tuple[str, str]]:
    texts = [str(each) for each in all_shardings(list(axes), num_dims)]
    return [(one, other) for one in texts for other in texts]


@pytest.mark.parametrize("shape", [(4, 8), (5, 3)])
def test_every_pair_on_two_by_two_ranks(shape: tuple[int, int]) -> None:
    axes = {"x": 2, "y": 2}
    check(axes, shape, all_pairs(axes, 2))


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("shape", [(8, 8), (5, 3)])
def test_every_pair_on_eight_ranks(shape: tuple[int, int], part: int) -> None:
    axes = {"x": 2, "y": 2, "z": 2}
    pairs = all_pairs(axes, 2)
    assert len(pairs) == 8464
    check(axes, shape, pairs[part::4])


_RUN = "titan_moe.distributed.redistribution:_Run"
BUGS = {
    "order swapped": Planted(
        "titan_moe.distributed.sharding:Sharding.box",
        "for axis in self.cuts[dim] if",
        "for axis in self.cuts[dim][::-1] if",
        [("R", "S(0)[x,y]")],
    ),
    "wrong innermost axis": Planted(
        "titan_moe.distributed.sharding_moves:_all_gathers",
        "cuts = tuple(cut[:n] for",
        "cuts = tuple(cut[len(cut) - n :] for",
        [("S(0)[x,y]", "S(0)[y]")],
    ),
    "remainder lost": Planted(
        "titan_moe.distributed.sharding:Sharding.box",
        "each = -(-(last - first) // axes[axis])",
        "each = (last - first) // axes[axis]",
        [("R", "S(0)[x]")],
        shape=(5, 3),
    ),
    "sum over other ranks lost": Planted(
        "titan_moe.distributed.boxes:exchange_boxes",
        ".sum(0)",
        "[place]",
        [("P[x]", "S(0)[x]")],
    ),
    "sum not taken": Planted(
        f"{_RUN}.summed",
        "dist.all_reduce(local, group=self.mesh.group(self.axes))",
        "pass",
        [("P[x]", "R")],
    ),
    "a sum of copies": Planted(
        f"{_RUN}.first_only",
        "if self.mesh.rank == members[0] else torch.zeros_like(local)",
        "",
        [("R", "P[x]")],
    ),
    "gradients of a gather not added": Planted(
        "titan_moe.distributed.redistribution:_StepFunction.backward",
        'add=step.op == "all_gather"',
        "add=False",
        [("S(0)[x]", "R")],
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    bug = BUGS[name]
    right_source(bug)
    check({"x": 2, "y": 2}, bug.shape, bug.pairs)
    with pytest.raises((AssertionError, RankError)):
        check({"x": 2, "y": 2}, bug.shape, bug.pairs, bug)


def move_wrong(axes: dict[str, int]) -> None:
    steps = plan("S(0)[x]", "R", axes=axes, shape=(4, 4), dtype=torch.float64)
    execute(steps, torch.zeros(4, 4, dtype=torch.float64), Mesh(axes))


def test_a_part_of_another_shape_is_refused() -> None:
    with pytest.raises(
        RankError, match=r"holds \[4, 4\], not \[2, 4\]: its part of \[4, 4\] under"
    ):
        run_on_ranks(move_wrong, 2, {"x": 2})
