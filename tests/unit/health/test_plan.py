"""The order of the checks: every pair once, in as few rounds as it goes."""

from itertools import combinations

import pytest

from titan_moe.health.plan import ALONE, NODES, PAIRS_OF_NODES, PAIRS_OF_RANKS, plan, rounds


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 64])
def test_every_pair_meets_once_and_all_rounds_are_full(count: int) -> None:
    found = list(rounds(count))
    assert sorted(pair for pairs in found for pair in pairs) == [*combinations(range(count), 2)]
    assert len(found) == (count - 1 + count % 2 if count > 1 else 0)
    for pairs in found:
        assert len({player for pair in pairs for player in pair}) == 2 * (count // 2)


@pytest.mark.parametrize(
    ("nodes", "ranks", "checks"),
    [
        (1, 1, []),
        (1, 2, [PAIRS_OF_RANKS]),
        (2, 1, [PAIRS_OF_NODES]),
        (1, 8, [*[PAIRS_OF_RANKS] * 7, NODES]),
        (8, 8, [*[PAIRS_OF_RANKS] * 7, NODES, *[PAIRS_OF_NODES] * 7]),
    ],
)
def test_links_are_checked_inside_nodes_and_between_them(
    nodes: int, ranks: int, checks: list[str]
) -> None:
    stages = plan(nodes, ranks)
    assert [stage.check for stage in stages] == [*ALONE, *checks]
    for stage in stages:
        busy = [rank for group in stage.groups.values() for rank in group]
        assert sorted(busy) == list(range(nodes * ranks))


def test_a_pair_of_nodes_is_all_their_ranks() -> None:
    last = plan(3, 2)[-1]
    assert (last.words, last.group_of(0)) == (
        "all-reduce, pairs of nodes, round 3 of 3",
        [0, 1, 2, 3],
    )
    assert last.group_of(5) is None
