"""Loans between ranks, beside a sweep over lists of rows in plain Python."""

import random

import pytest
import torch

from tests.support.tiers import tiered
from titan_moe.debug.router_load import WORKLOADS, Place, rows_of_experts
from titan_moe.moe.dispatch.balanced import cut, plan_loans

Row = tuple[int, int, int]
"""Home, expert there, and source."""


def sweep(lists: list[list[Row]]) -> list[tuple[list[Row], list[Row]]]:
    """Returns the rows of each rank that it computes of its own, and those that it borrows.

    The first overloaded rank lends to one rank after the other what that lacks, and then lacks
    something itself, which comes first of what the next overloaded rank lends.
    """
    ranks, total = len(lists), sum(map(len, lists))
    shares = [total * (n + 1) // ranks - total * n // ranks for n in range(ranks)]
    lenders = [n for n in range(ranks) if len(lists[n]) > shares[n]]
    asks = [n for n in range(ranks) if len(lists[n]) < shares[n]]
    borrowed: list[list[Row]] = [[] for _ in lists]
    lent: list[list[tuple[int, int]]] = [[] for _ in lists]
    for lender in lenders:
        left = len(lists[lender])
        while left > shares[lender] and asks:
            rank = asks.pop(0)
            missing = shares[rank] - (left_of(lists, lent, rank))
            lent[lender].append((rank, missing))
            left -= missing
        if left < shares[lender]:
            asks.insert(0, lender)
    for lender, loans in enumerate(lent):
        at = left_of(lists, lent, lender)
        for rank, number in loans:
            borrowed[rank] = lists[lender][at : at + number]
            at += number
    own = [rows[: left_of(lists, lent, n)] for n, rows in enumerate(lists)]
    return list(zip(own, borrowed, strict=True))


def left_of(lists: list[list[Row]], lent: list[list[tuple[int, int]]], rank: int) -> int:
    return len(lists[rank]) - sum(number for _, number in lent[rank])


def check(counts_PES: torch.Tensor) -> None:
    _, num_local, sources = counts_PES.shape
    lists = [
        [(rank, n, s) for n in range(num_local) for s in range(sources) for _ in range(rows[n][s])]
        for rank, rows in enumerate(counts_PES.tolist())
    ]
    loans = plan_loans(counts_PES.sum((1, 2)))
    parts = cut(counts_PES, loans)
    for rank, (own, borrowed) in enumerate(sweep(lists)):
        for rows, part_PES in ((own, parts.own_PES), (borrowed, parts.borrowed_PES)):
            expected = torch.zeros(num_local, sources, dtype=torch.int64)
            for _, expert, source in rows:
                expected[expert, source] += 1
            assert torch.equal(part_PES[rank], expected), (counts_PES.tolist(), rank)
        assert {home for home, _, _ in borrowed} <= {int(loans.home_P[rank])} - {rank}
    computed_P = (parts.own_PES + parts.borrowed_PES).sum((1, 2))
    assert computed_P.max() - computed_P.min() <= 1


@pytest.mark.parametrize("number", tiered([1_000], slow=[10_000]))
def test_loans_of_drawn_counts_are_those_of_a_sweep_and_even(number: int) -> None:
    draw = random.Random(0)
    for seed in range(number):
        torch.manual_seed(seed)
        shape = draw.choice([2, 3, 4, 8]), draw.choice([1, 2, 4]), draw.choice([1, 2, 4])
        counts_PES = torch.randint(0, draw.choice([2, 6]), shape)
        if draw.random() < 0.5:  # Few ranks have rows.
            counts_PES *= torch.rand(shape[0], 1, 1) < 0.4
        check(counts_PES)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("slices", [1, 2])
def test_loans_of_workloads_are_even(workload: str, slices: int) -> None:
    rows = [rows_of_experts(workload, 4, Place(n % 4, 4, 16, 4), 64) for n in range(4 * slices)]
    counts_PES = torch.tensor(rows).t().unflatten(0, (4, 4)).contiguous()
    check(counts_PES)
    loans = plan_loans(counts_PES.sum((1, 2)))
    assert (loans.kept_P + loans.size_P).tolist() == [64 * 4 * slices] * 4
    assert workload != "W0" or not loans.size_P.any()
