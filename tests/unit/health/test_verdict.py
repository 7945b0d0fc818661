"""Who is named for what the ranks found."""

from collections.abc import Mapping
from typing import Any

import pytest

from titan_moe.health.plan import Stage, plan
from titan_moe.health.table import table
from titan_moe.health.verdict import Judge, Rank, outcomes

_TIMEOUT_S = 20


def ranks_of(nodes: int, ranks: int, kind: str = "H100") -> list[Rank]:
    return [Rank(node, f"gpu-{node}", gpu, kind) for node in range(nodes) for gpu in range(ranks)]


def found(
    stages: list[Stage], rates: Mapping[Any, float], problems: dict | None = None
) -> list[dict[int, dict[str, Any]]]:
    """What ranks find if all is alike, but for some rates and problems by check and group."""
    names = {"matmul": ["matmul"], "memory": ["memory"], "disk": ["write", "read"]}
    return [
        {
            rank: {
                "rates": {
                    name: rates.get((stage.check, units), 1.0) * 1e9
                    for name in names.get(stage.check, ["all-reduce"])
                },
                "problem": (problems or {}).get((stage.check, units), ""),
            }
            for units, group in stage.groups.items()
            for rank in group
        }
        for stage in stages
    ]


def judged(
    nodes: int, ranks: int, rates: dict, problems: dict | None = None, slow: float | None = None
) -> list[str]:
    stages = plan(nodes, ranks)
    judge = Judge(ranks_of(nodes, ranks), _TIMEOUT_S, slow)
    return judge.lines(stages, found(stages, rates, problems))


def test_nothing_is_named_where_all_are_alike() -> None:
    assert judged(8, 8, {}) == []
    assert judged(1, 1, {}) == []


def test_a_slow_rank_is_compared_with_the_others() -> None:
    assert judged(1, 8, {("matmul", (5,)): 0.61}) == [
        "rank 5 (host gpu-0, GPU 5): matmul at 61 % of the others"
    ]
    # Of two, the slow one only.
    assert judged(1, 2, {("memory", (1,)): 0.5}) == [
        "rank 1 (host gpu-0, GPU 1): memory copies at 50 % of the others"
    ]
    assert judged(1, 8, {("matmul", (5,)): 0.85}) == []
    assert len(judged(1, 8, {("matmul", (5,)): 0.85}, slow=0.9)) == 1


def test_disks_and_cpus_may_differ_more() -> None:
    assert judged(2, 2, {("disk", (3,)): 0.3}) == []
    assert judged(2, 2, {("disk", (3,)): 0.2}) == [
        "rank 3 (host gpu-1, GPU 1): writing to the disk at 20 % of the others"
    ]
    cpus = [Rank(0, "a", None, "CPU")] * 4
    stages = plan(1, 4)
    judge = Judge(cpus, _TIMEOUT_S, None)
    assert judge.lines(stages, found(stages, {("matmul", (2,)): 0.5})) == []
    assert judge.lines(stages, found(stages, {("matmul", (2,)): 0.3})) == [
        "rank 2 (host a): matmul at 30 % of the others"
    ]


def test_only_alike_devices_are_compared() -> None:
    stages = plan(2, 2)
    mixed = [*ranks_of(1, 2), *(Rank(1, "gpu-1", gpu, "A100") for gpu in range(2))]
    rates = {("matmul", (2,)): 0.3, ("matmul", (3,)): 0.3}
    assert Judge(mixed, _TIMEOUT_S, None).lines(stages, found(stages, rates)) == []


_RANK_1, _RANK_2 = (f"rank {rank} (host gpu-0, GPU {rank})" for rank in (1, 2))
_OF_RANK_2 = {("pairs of ranks", pair): 0.3 for pair in [(0, 2), (1, 2)]}
_OF_NODE_0 = {("pairs of nodes", pair): 0.3 for pair in [(0, 1), (0, 2)]}
_NODE_1, _NODE_3 = "node 1 (host gpu-1)", "node 3 (host gpu-3)"


@pytest.mark.parametrize(
    ("nodes", "ranks", "rates", "says"),
    [
        (1, 4, {("pairs of ranks", (1, 2)): 0.4}, f"{_RANK_1} and {_RANK_2}: all-reduce at 40 %"),
        (1, 3, _OF_RANK_2, f"{_RANK_2}: all-reduce with each other rank at 30 %"),
        (2, 3, {("all ranks of a node", (1,)): 0.3}, f"{_NODE_1}: all-reduce of its ranks at 30 %"),
        (3, 1, _OF_NODE_0, "node 0 (host gpu-0): all-reduce with each other node at 30 %"),
        (4, 2, {("pairs of nodes", (1, 3)): 0.5}, f"{_NODE_1} and {_NODE_3}: all-reduce at 50 %"),
        (1, 2, {("pairs of ranks", (0, 1)): 0.1}, None),  # Nothing to compare with.
    ],
)
def test_a_slow_link_is_named_or_what_all_slow_links_share(
    nodes: int, ranks: int, rates: dict, says: str | None
) -> None:
    assert judged(nodes, ranks, rates) == ([f"{says} of the others"] if says else [])


def test_what_is_wrong_is_always_named() -> None:
    problems: dict = {("matmul", (3,)): "2 of 9 elements are wrong"}
    problems |= {("disk", (rank,)): "cannot write: No space" for rank in range(4)}
    problems |= {("pairs of ranks", (0, 1)): "7 sums are wrong"}
    assert judged(2, 2, {}, problems, slow=0.01) == [
        "rank 3 (host gpu-1, GPU 1): matmul: 2 of 9 elements are wrong",
        "ranks 0-3 (host gpu-0, gpu-1): disk: cannot write: No space",
        "rank 0 (host gpu-0, GPU 0) and rank 1 (host gpu-0, GPU 1): all-reduce: 7 sums are wrong",
    ]


def test_what_has_not_ended_is_named_by_group() -> None:
    stages = plan(2, 2)
    results = found(stages, {})[:4]
    del results[3][2]
    assert Judge(ranks_of(2, 2), _TIMEOUT_S, None).lines(stages, results) == [
        "rank 2 (host gpu-1, GPU 0) and rank 3 (host gpu-1, GPU 1): all-reduce had not ended after "
        "20 s"
    ]
    del results[3], results[0][1]
    assert Judge(ranks_of(2, 2), _TIMEOUT_S, None).lines(stages, results[:1]) == [
        "rank 1 (host gpu-0, GPU 1): matmul had not ended after 20 s"
    ]


def test_many_lines_are_cut() -> None:
    problems = {("matmul", (rank,)): f"{rank} are wrong" for rank in range(64)}
    lines = judged(8, 8, {}, problems)
    assert len(lines) == 13 and lines[-1] == "and 52 more"


def test_the_table_has_every_rank_and_every_kind_of_link() -> None:
    stages, ranks = plan(2, 3), ranks_of(2, 3)
    rates = {("matmul", (4,)): 651e3, ("pairs of ranks", (3, 5)): 0.5}
    lines = table(ranks, outcomes(stages, found(stages, rates)))
    assert lines[0].split() == ["rank", "host", "device", "matmul", "memory", "write", "read"]
    words = [" ".join(line.split()) for line in lines]
    assert words[5] == "4 gpu-1 GPU 1, H100 651.0 TFLOP/s 1.00 GB/s 1.00 GB/s 1.00 GB/s"
    assert words[9] == "pairs of ranks 3, 5 0.50 GB/s 1.00 GB/s"
    assert len(lines) == 12
