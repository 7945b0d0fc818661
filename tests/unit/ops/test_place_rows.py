"""Counting, sorting and copying against slow loops."""

from tests.support.place_cases import cases, check


def test_counts_sort_and_copies_equal_the_slow_loops() -> None:
    assert check() == len(list(cases()))
