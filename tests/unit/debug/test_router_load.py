"""Workloads: exact counts of rows by expert and rank."""

from collections import Counter

import pytest
import torch

from titan_moe.debug.router_load import WORKLOADS, Place, RouterLoad, rows_of_experts

RANKS, EXPERTS, TOP_K, TOKENS = 4, 16, 4, 64


def of_ranks(workload: str, step: int) -> list[int]:
    """The rows of each rank's experts, from all ranks."""
    rows = [0] * RANKS
    for source in range(RANKS):
        place = Place(source, RANKS, EXPERTS, TOP_K)
        for expert, number in enumerate(rows_of_experts(workload, step, place, TOKENS)):
            rows[expert // (EXPERTS // RANKS)] += number
    return rows


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("step", [1, 4])
def test_tokens_go_to_distinct_experts_as_often_as_said(workload: str, step: int) -> None:
    for source in range(RANKS):
        place = Place(source, RANKS, EXPERTS, TOP_K)
        load = RouterLoad(workload, place, layer=3)
        load.step = step
        experts_TK = load(torch.zeros(TOKENS, EXPERTS))
        assert all(len(set(row)) == TOP_K for row in experts_TK.tolist())
        found = Counter(experts_TK.flatten().tolist())
        said = rows_of_experts(workload, step, place, TOKENS)
        assert [found[expert] for expert in range(EXPERTS)] == said


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(
    ("ranks", "experts", "top_k"), [(1, 8, 2), (2, 4, 3), (2, 2, 2), (4, 4, 3)]
)
def test_few_experts_and_ranks_have_room_for_all_rows(
    workload: str, ranks: int, experts: int, top_k: int
) -> None:
    for source in range(ranks):
        load = RouterLoad(workload, Place(source, ranks, experts, top_k), layer=0)
        chosen_TK = load(torch.zeros(24, experts))
        assert chosen_TK.shape == (24, top_k)
        assert all(len(set(row)) == top_k for row in chosen_TK.tolist())


def test_each_workload_gives_ranks_the_rows_that_it_names() -> None:
    even = [TOKENS * TOP_K] * RANKS
    hot, cold = 2 * TOKENS * TOP_K, [TOKENS * TOP_K * 2 // 3] * 3
    assert of_ranks("W0", 1) == even
    assert sum(of_ranks("W1", 1)) == sum(even)
    assert max(of_ranks("W2", 1)) == hot
    assert sorted(of_ranks("W2", 1))[:3] == pytest.approx(cold, abs=4)
    assert of_ranks("W3", 1) == pytest.approx(even, abs=4)
    assert max(of_ranks("W4", 1)) == (hot + even[0]) // 2
    assert sorted(of_ranks("W5", 1))[0] == 0 and max(of_ranks("W5", 1)) < hot
    moves = [of_ranks("W6", step).index(hot) for step in range(1, 5)]
    assert sorted(moves) == list(range(RANKS)) and moves[1] == (moves[0] + 1) % RANKS
    assert of_ranks("W7", 1) == even and max(of_ranks("W7", 4)) == hot


def test_a_token_visits_as_many_ranks_as_with_a_random_router() -> None:
    for workload, visited in {"W0": 5.375, "W2": 4.2, "W5": 5.2}.items():
        ranks = 0
        for source in range(8):
            experts_TK = RouterLoad(workload, Place(source, 8, 128, 8), 0)(torch.zeros(512, 128))
            ranks += sum(len(set(row)) for row in (experts_TK // 16).tolist())
        assert ranks / (8 * 512) == pytest.approx(visited, abs=0.6)
