"""Cross-entropy of whole and of cut logits against torch's loss: plain and interpreted kernels."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.cross_entropy_cases import DTYPES, SIZES, check


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_equals_torchs_loss(dtype: torch.dtype) -> None:
    assert check(dtype) == 2 * len(SIZES)


def test_triton_kernels_in_the_interpreter_equal_torchs_loss() -> None:
    pytest.importorskip("triton")
    # A process of its own: Triton reads the variable when it is imported.
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret_cross_entropy"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == 2 * len(SIZES) * len(DTYPES)
