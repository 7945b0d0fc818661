"""Plans against torch's own, by the script that compares them."""

from itertools import product

from scripts.bench import redistribution
from scripts.bench.redistribution import PLANNERS, compare, pairs_of, planning_seconds, summary
from titan_moe.testing.process_pool import in_fresh_processes
from titan_moe.testing.shardings import all_shardings

AXES = {"x": 2, "y": 2}


def test_no_plan_of_torch_is_cheaper() -> None:
    """Between all shardings of a matrix over two axes."""
    pairs = pairs_of(AXES, 2, None)
    shardings = set(all_shardings("xy", 2))
    assert len(shardings) == 18
    assert set(pairs) == {(a, b) for a, b in product(shardings, repeat=2) if a != b}
    # Torch keeps what it has learnt of a mesh: the fake world gets a process.
    ((_, found),) = in_fresh_processes(compare, [(AXES, 2, pairs)], num_workers=1)
    assert set(found) == {f"{p}{each}" for p in PLANNERS for each in ("", ", one axis at a time")}
    for planner, costs in found.items():
        assert summary(costs)["above"] == 0, planner
    assert len(found["least UnitCosts"]) == len(pairs)
    # The same moves and the same costs: neither is ever below.
    assert summary(found["least UnitCosts, one axis at a time"])["below"] == 0
    assert summary(found["least UnitCosts"])["below"] > 50


def test_a_drawn_pair_is_planned_anew() -> None:
    seconds = list(planning_seconds(3))
    assert len(seconds) == 3 and all(each > 0 for each in seconds)
    assert redistribution.summary([(4, 2), (1, 1)]) == {
        "pairs": 2,
        "below": 1,
        "above": 0,
        "mean_theirs": 2.5,
        "mean_ours": 1.5,
        "most_saved": 2,
    }
