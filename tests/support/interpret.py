"""Runs Triton kernels on the CPU over all cases of an operation, in a process of its own."""

import sys
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.support.jobs import run_to_end
from titan_moe.ops import rotate
from titan_moe.ops.operation import KERNELS

CASES = {
    "cross_entropy": ["cross_entropy", "block_statistics", "gradient_in_place"],
    "gated": ["gated_rows", "gated_rows_backward"],
    "move_rows": ["copy_rows", "add_rows"],
    "permute": ["permute_indices"],
    "rotate": ["rotate_heads"],
    "sort_rows": ["sort_by_expert", "copies_to_ranks"],
}
"""The kernels that the cases in tests/support/NAME_cases.py run, by name."""


def cases_of(name: str) -> Any:
    return import_module(f"tests.support.{name}_cases")


def check_interpreted(name: str) -> None:
    """Checks a name's kernels in a new process: Triton reads the variable when it is imported."""
    pytest.importorskip("triton")
    run = run_to_end(sys.executable, "-m", "tests.support.interpret", name, TRITON_INTERPRET=1)
    assert run.returncode == 0, run.stderr


def _interpret(name: str) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # Fills what a kernel forgets to write.
    cases = cases_of(name)
    for kernel in CASES[name]:
        KERNELS[kernel]["cpu"] = KERNELS[kernel]["cuda"]
    rotate.rotate_reference = lambda *arguments: rotate.rotate_by_kernel(*arguments)
    cases.check_kernels("cpu")
    ours = [module for module in sys.modules if module.startswith("titan_moe.ops.")]
    assert any(module.endswith("_triton") for module in ours), "no kernel was called"


if __name__ == "__main__":
    _interpret(sys.argv[1])
