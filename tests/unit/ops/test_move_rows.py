"""copy_rows and add_rows against slow loops: the torch reference and the interpreted kernels."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.move_rows_cases import DTYPES, SIZES, check
from titan_moe.ops.move_rows import copy_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_equals_the_slow_loops(dtype: torch.dtype) -> None:
    assert check(dtype) == len(SIZES)


def test_without_padding_rows_are_copied_in_one_pass() -> None:
    x_TD = torch.randn(4, 3)
    source_R = torch.tensor([3, 0, 0, 1])
    assert torch.equal(copy_rows(x_TD, source_R, is_padded=False), x_TD[source_R])


def test_triton_kernels_in_the_interpreter_equal_the_slow_loops() -> None:
    pytest.importorskip("triton")
    # A process of its own: Triton reads the variable when it is imported.
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret_move_rows"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == len(SIZES) * len(DTYPES)
