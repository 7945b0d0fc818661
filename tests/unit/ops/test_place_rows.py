"""Counting, sorting and copying against slow loops: plain torch and the interpreted kernels."""

from tests.support.interpret import count_interpreted
from tests.support.place_cases import cases, check

NUM_CASES = len(list(cases()))


def test_reference_equals_the_slow_loops() -> None:
    assert check() == NUM_CASES


def test_triton_kernels_in_the_interpreter_equal_the_slow_loops() -> None:
    assert count_interpreted("place_rows") == NUM_CASES
