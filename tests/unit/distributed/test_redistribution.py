"""Plans between shardings: their costs against all ways there are, and their limits."""

import random
from functools import cache

import numpy as np
import pytest
import torch

from tests.support.shardings import all_shardings
from titan_moe.distributed.redistribution import Plan, plan
from titan_moe.distributed.sharding import Sharding

AXES = {"x": 2, "y": 2, "z": 2}


def planned(source: str | Sharding, target: str | Sharding, **options: object) -> Plan:
    options = {"axes": AXES, "shape": (16, 16), "dtype": torch.float32} | options
    return plan(source, target, **options)  # type: ignore[arg-type]


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
def test_known_costs(source: str, target: str, one_axis: int, all_moves: int) -> None:
    assert planned(source, target, joint=False).cost == one_axis
    assert planned(source, target).cost == all_moves


def _edge(before: Sharding, after: Sharding, joint: bool) -> float:
    """Returns the cost of the cheapest single move between two shardings; inf if there is none.

    Computed independently of production, from the axes that come and go in each dim.
    """
    cuts = [(b, a) for b, a in zip(_dims(before), _dims(after), strict=True) if b != a]
    dropped = before.partial - after.partial
    if after.partial - before.partial:
        free = len(after.partial - before.partial) == 1 and not cuts and not dropped
        taken = after.partial & {axis for cut in before.cuts for axis in cut}
        return 0 if free and not taken else np.inf
    shorter = [b[len(a) :] for b, a in cuts if b[: len(a)] == a]
    longer = [a[len(b) :] for b, a in cuts if a[: len(b)] == b]
    cost = np.inf
    if not cuts:
        moved, cost = len(dropped), 4
    elif len(shorter) == len(cuts) and not dropped:
        moved, cost = sum(map(len, shorter)), 2
    elif len(longer) == len(cuts) == 1 and not dropped:
        return 0 if len(longer[0]) == 1 else np.inf
    elif len(longer) == len(cuts) == 1 and set(longer[0]) == dropped:
        moved, cost = len(dropped), 2
    elif len(shorter) == len(longer) == 1 and shorter == longer and not dropped:
        moved, cost = len(shorter[0]), 1
    elif all(sorted(b) == sorted(a) for b, a in cuts) and not dropped:
        moved, cost = 2, 1 if joint else np.inf
    else:
        return np.inf
    return cost if joint or moved == 1 else np.inf


def _dims(sharding: Sharding) -> list[tuple[str, ...]]:
    return [*sharding.cuts, *((),) * (2 - len(sharding.cuts))]


@cache
def _least_costs(joint: bool) -> tuple[list[Sharding], np.ndarray]:
    """Returns the 92 shardings and the least costs between them, by Floyd and Warshall."""
    states = list(all_shardings("xyz", 2))
    costs = np.array([[0 if a == b else _edge(a, b, joint) for b in states] for a in states])
    for middle in range(len(states)):
        costs = np.minimum(costs, costs[:, middle, None] + costs[None, middle])
    return states, costs


def _compare(pairs: list[tuple[int, int]], joint: bool) -> None:
    states, costs = _least_costs(joint)
    assert len(states) == 92
    for one, other in pairs:
        found = planned(states[one], states[other], joint=joint)
        assert found.cost == costs[one, other], f"{found.source} -> {found.target}\n{found}"


@pytest.mark.parametrize("joint", [True, False])
def test_no_way_is_cheaper(joint: bool) -> None:
    pairs = [(one, other) for one in range(92) for other in range(92)]
    _compare(random.Random(3).sample(pairs, 200), joint)


def test_bytes_are_those_of_the_largest_part() -> None:
    (gather,) = planned("S(0)[x,y]", "S(0)[x]", shape=(16, 4)).steps
    assert (gather.op, gather.axes, gather.bytes) == ("all_gather", ("y",), 4 * 4 * 4)
    (exchange,) = planned("S(0)[x,y]", "S(1)[x,y]", shape=(16, 4)).steps
    assert (exchange.op, exchange.bytes) == ("all_to_all", 3 * 4 * 4)
    (permute,) = planned("S(0)[x,y,z]", "S(0)[z,y,x]", shape=(16, 4)).steps
    assert (permute.op, permute.bytes) == ("permute", 2 * 4 * 4)
