"""Counting, sorting and copying against slow loops: plain torch and the interpreted kernels."""

import os
import subprocess
import sys

import pytest

from tests.support.place_cases import cases, check

NUM_CASES = len(list(cases()))


def test_reference_equals_the_slow_loops() -> None:
    assert check() == NUM_CASES


def test_triton_kernels_in_the_interpreter_equal_the_slow_loops() -> None:
    pytest.importorskip("triton")
    # A process of its own: Triton reads the variable when it is imported.
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret_place_rows"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == NUM_CASES
