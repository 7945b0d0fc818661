"""Plans between shardings: their costs against all ways there are, and their limits."""

import random
from functools import cache
from itertools import permutations
from math import prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.support.shardings import all_shardings
from titan_moe.distributed.boxes import overlap, sizes
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.distributed.redistribution import Plan, group_over, plan, plan_redistribution
from titan_moe.distributed.sharding import Sharding
from titan_moe.distributed.sharding_moves import COSTS, LOCAL_OPS
from titan_moe.simulate.fake_rank import fake_world

AXES = {"x": 2, "y": 2, "z": 2}
STATES = list(all_shardings("xyz", 2))


def planned(source: str | Sharding, target: str | Sharding, **options: object) -> Plan:
    options = {"axes": AXES, "shape": (16, 16), "dtype": torch.float32} | options
    return plan(source, target, **options)  # type: ignore[arg-type]


def peak(found: Plan) -> int:
    return max((step.peak_bytes for step in found.steps), default=0)


@pytest.mark.parametrize(
    ("source", "target", "one_axis", "all_moves"),
    [
        ("S(0)[x]S(1)[y]", "S(1)[x,y]", 3, 2),
        ("P[x]S(0)[y]", "S(0)[x,y]", 4, 3),
        ("S(0)[y]", "S(0)[y,x]", 0, 0),
        ("S(0)[y]", "S(0)[x,y]", 2, 1),
        ("S(0)[x,y,z]", "S(0)[y,z]", 6, 2),
        ("S(0)[x,y,z]", "R", 6, 2),
        ("S(0)[x,y,z]", "S(0)[z,y,x]", 6, 1),
        ("S(0)[x]S(1)[y]", "R", 4, 2),
        ("R", "P[x]S(1)[y]", 0, 0),
        ("P[x]", "R", 4, 4),
    ],
)
def test_plans_have_known_costs(source: str, target: str, one_axis: int, all_moves: int) -> None:
    assert planned(source, target, joint=False).cost == one_axis
    assert planned(source, target).cost == all_moves


def _move(before: Sharding, after: Sharding) -> tuple[str, int]:
    """Returns the op of the one move between two shardings and its number of axes; "" if none.

    Found independently of production, from the axes that come and go in each dim.
    """
    cuts = [(b, a) for b, a in zip(_dims(before), _dims(after), strict=True) if b != a]
    dropped, added = before.partial - after.partial, after.partial - before.partial
    shorter = [b[len(a) :] for b, a in cuts if b[: len(a)] == a]
    longer = [a[len(b) :] for b, a in cuts if a[: len(b)] == b]
    if added:
        return ("", 0) if cuts or dropped else ("to_partial", len(added))
    if not cuts:
        return "all_reduce", len(dropped)
    if dropped:
        scatters = len(longer) == len(cuts) == 1 and set(longer[0]) == dropped
        return ("reduce_scatter", len(dropped)) if scatters else ("", 0)
    if len(shorter) == len(cuts):
        return "all_gather", sum(map(len, shorter))
    if len(longer) == len(cuts):
        return "slice", sum(map(len, longer))
    if len(shorter) == len(longer) == 1 and shorter == longer:
        return "all_to_all", len(shorter[0])
    return ("permute", 2) if all(sorted(b) == sorted(a) for b, a in cuts) else ("", 0)


def _dims(sharding: Sharding) -> list[tuple[str, ...]]:
    return [*sharding.cuts, *((),) * (2 - len(sharding.cuts))]


@cache
def _weights(shape: tuple[int, int], joint: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the most elements held under each of the 92 shardings, and unit cost, elements
    received and peak (without the source) of the moves between them, counted rank by rank:
    [3, 92, 92], inf where there is no move."""
    boxes = [[each.box(rank, shape, AXES) for rank in range(8)] for each in STATES]
    weights = np.full((3, 92, 92), np.inf)
    for one, other in permutations(range(92), 2):
        op, moved = _move(STATES[one], STATES[other])
        if not op or (moved > 1 and not joint and op not in LOCAL_OPS):
            continue
        n, numbers = 2**moved, []
        for before, after in zip(boxes[one], boxes[other], strict=True):
            old, new, both = (prod(sizes(box)) for box in (before, after, overlap(before, after)))
            received = {"all_reduce": 2 * old * (n - 1) // n, "reduce_scatter": new * (n - 1)}
            sent, arrived = {
                "all_gather": (old * n, new), "reduce_scatter": (old, new * n),
                "all_to_all": (old, new), "permute": (old, new),
            }.get(op, (0, 0))  # fmt: skip
            numbers.append((received.get(op, new - both), old + max(sent + arrived, arrived + new)))
        weights[:, one, other] = [COSTS[op], *np.max(numbers, 0)]
    return np.array([max(prod(sizes(box)) for box in ranks) for ranks in boxes]), weights


def _least(source: int, edges: np.ndarray, join: np.ufunc) -> np.ndarray:
    """Returns the least of all paths of up to 12 moves from a sharding to each other one."""
    best = np.where(np.arange(92) == source, 0, np.inf)
    for _ in range(12):
        best = np.minimum(best, join(best[:, None], edges).min(0))
    return best


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(
    ("cost", "shape"), [("unit", (16, 16)), ("bytes", (16, 16)), ("bytes", (5, 3))]
)
def test_no_plan_is_cheaper_or_holds_less(joint: bool, cost: str, shape: tuple[int, int]) -> None:
    (held, weights), chance = _weights(shape, joint), random.Random(3)
    for source in chance.sample(range(92), 8):
        peaks = weights[2] + np.where(np.arange(92) == source, 0, held[source])[:, None]
        fewest = _least(source, peaks, np.maximum)
        for target in chance.sample(sorted({*range(92)} - {source}), 8):
            options = {"shape": shape, "dtype": torch.int8, "joint": joint, "cost": cost}
            ends = STATES[source], STATES[target]
            least, usual = int(fewest[target]), peak(planned(*ends, **options))
            for bound in (None, least, chance.randint(least, usual)):
                allowed = np.where(
                    peaks <= (bound or np.inf), weights[int(cost == "bytes")], np.inf
                )
                found = planned(*ends, **options, max_bytes=bound)
                assert found.cost == _least(source, allowed, np.add)[target], f"{ends}\n{found}"
                assert bound is None or peak(found) <= bound
            with pytest.raises(ValueError, match=f"^max_bytes is .* allow at least {least:,}$"):
                planned(*ends, **options, max_bytes=least - 1)


def test_bytes_are_those_of_the_rank_that_receives_most_where_parts_are_empty() -> None:
    # Of 9 rows and columns over 8 ranks each, four parts have 2, one has 1 and three are empty.
    axes = {"x": 8, "y": 8, "z": 2}
    ends = "S(0)[x,z]S(1)[y]", "S(0)[x]S(1)[y,z]"
    (exchange,) = planned(*ends, axes=axes, shape=(9, 9)).steps
    assert (exchange.op, exchange.bytes) == ("all_to_all", 4)


def test_bytes_choose_another_plan_than_unit_costs() -> None:
    ends = "S(0)[x,y,z]", "S(1)[x,y]"
    usual, fewest = planned(*ends), planned(*ends, cost="bytes")
    assert [step.op for step in usual.steps] == ["all_gather", "slice"]
    assert [step.op for step in fewest.steps] == ["all_to_all", "all_gather"]
    assert fewest.cost == sum(step.bytes for step in fewest.steps) == 32 * 4 * (7 / 8 + 1)
    with pytest.raises(
        ValueError, match=r"^cost is 'byte': write 'unit' or 'bytes', or pass a function$"
    ):
        planned(*ends, cost="byte")


def test_a_function_prices_moves_by_shape_type_axes_and_ends_and_is_a_key_of_the_cache() -> None:
    asked = []

    def latency(*move: object) -> float:
        asked.append(move)
        return 1000.0 if "z" in move[2] else len(move[2])

    ends, shape = ("S(0)[x,z]", "S(1)[x,z]"), (16, 16)
    (usual,) = planned(*ends).steps
    priced = planned(*ends, cost=latency)
    assert usual.axes == ("x", "z") and priced.cost == 1000
    assert {move[:2] for move in asked} == {(shape, torch.float32)}
    assert {type(each) for _, _, _, *both in asked for each in both} == {Sharding}
    asked.clear()
    assert planned(*ends, cost=latency) is priced and not asked
    assert planned(*ends, cost=latency, dtype=torch.int32) is not priced and asked
    assert planned(*ends, cost=lambda *_: 1) is not planned(*ends, cost=lambda *_: 1)


def test_redistribution_uses_groups_of_the_program() -> None:
    with fake_world(0, 8):
        meshes = ParallelDims(8, dp_replicate=2, ep=2).build_mesh("cpu")
        mesh, number = meshes["dp_replicate", "edp", "ep"], meshes.groups.num_groups
        assert group_over(mesh, ("edp", "ep")) is meshes.group("fsdp")
        assert group_over(mesh, ("dp_replicate", "ep")).size() == 4
        assert meshes.groups.num_groups == number + 1


def test_a_world_with_a_device_gathers_at_once_on_meshes_of_all_its_ranks() -> None:
    """All ranks split NCCL's communicator at once; the ranks of a part would wait for the rest."""
    for ranks, gathers in ((8, 1), (4, 2)):
        with fake_world(0, 8):
            mesh = DeviceMesh("cpu", torch.arange(ranks).view(2, -1), mesh_dim_names=("x", "y"))
            part = DTensor.from_local(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)])
            dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
            assert len(plan_redistribution(part, "R").steps) == gathers
