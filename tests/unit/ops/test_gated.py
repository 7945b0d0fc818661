"""The gated activations against autograd: the torch reference and the interpreted kernels."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.gated_cases import TOLERANCES, cases, check

NUM_CASES = len(list(cases(torch.float64)))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_values_and_gradients_equal_autograd(dtype: torch.dtype) -> None:
    assert check(dtype) == NUM_CASES


def test_triton_kernels_in_the_interpreter_equal_autograd() -> None:
    pytest.importorskip("triton")
    # A process of its own: Triton reads the variable when it is imported.
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret_gated"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == NUM_CASES * len(TOLERANCES)
