"""Speeds that others have published for H100s, beside those that the planner expects."""

from statistics import median

from scripts.bench.plan_rows import ROWS, expected


def test_published_speeds_are_expected_within_a_half_and_without_a_bias() -> None:
    ratios = [(expected(row) or 0.0) / row.tokens for row in ROWS]
    assert all(0.6 < ratio < 1.5 for ratio in ratios), ratios
    assert 0.9 < median(ratios) < 1.1
