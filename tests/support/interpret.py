"""Runs Triton kernels on the CPU over all cases of an operation, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from titan_moe.ops.operation import KERNELS


def count_interpreted(operation: str) -> int:
    """Returns the number of cases that the interpreted kernels pass.

    The process is a new one because Triton reads the variable when it is imported.
    """
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret", operation],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def _run_triton(*operations: str) -> None:
    """Lets operations run on the CPU what they run on CUDA."""
    for name in operations:
        KERNELS[name]["cpu"] = KERNELS[name]["cuda"]


def _cross_entropy() -> int:
    from tests.support.cross_entropy_cases import DTYPES, check, check_labels_outside

    _run_triton("cross_entropy", "block_statistics", "gradient_in_place")
    check_labels_outside()
    return sum(map(check, DTYPES))


def _gated() -> int:
    from tests.support.gated_cases import TOLERANCES, check

    _run_triton("gated_forward", "gated_backward")
    return sum(check(dtype, rounds_once=True) for dtype in TOLERANCES)


def _move_rows() -> int:
    from tests.support.move_rows_cases import DTYPES, check

    _run_triton("copy_rows", "add_rows")
    return sum(map(check, DTYPES))


def _permute_indices() -> int:
    from tests.support.permute_cases import ALIGNMENTS, cases, check

    _run_triton("permute_indices")
    checks = [(*case, alignment) for alignment in ALIGNMENTS for case in cases()]
    for arguments in checks:
        check(*arguments)
    return len(checks)


def _rotate() -> int:
    from tests.support.rotate_cases import DTYPES, check
    from titan_moe.ops import rotate

    _run_triton("rotate_heads")
    rotate.rotate_reference = lambda *arguments: rotate._Rotate.apply(*arguments)
    return sum(map(check, DTYPES))


def _sort_rows() -> int:
    from tests.support.permute_cases import check_choices

    _run_triton("count_experts", "sort_by_expert", "copies_to_ranks")
    return check_choices()


_OPERATIONS: dict[str, Callable[[], int]] = {
    "cross_entropy": _cross_entropy,
    "gated": _gated,
    "move_rows": _move_rows,
    "permute_indices": _permute_indices,
    "rotate": _rotate,
    "sort_rows": _sort_rows,
}

if __name__ == "__main__":
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # Fills what a kernel forgets to write.
    print(_OPERATIONS[sys.argv[1]]())
