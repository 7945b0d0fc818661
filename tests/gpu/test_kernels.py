"""The kernels on CUDA, against the slow loops of the CPU tests."""

import pytest
import torch

from tests.unit.kernels.permute_cases import ALIGNMENTS, cases, check
from tests.unit.kernels.test_grouped_mm import SIZES, check_against_the_slow_loop
from titan_moe.kernels.permute_indices import max_padded_rows, permute_indices

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("row_alignment", ALIGNMENTS)
def test_permute_indices_equals_the_slow_loop(row_alignment):
    for counts, unused in cases():
        check(counts, unused, row_alignment, device="cuda")


def test_permute_indices_equals_the_reference_at_full_size():
    counts_PE = torch.randint(0, 400, (64, 32), generator=torch.Generator().manual_seed(0))
    num_rows = int(counts_PE.sum())
    sizes = {
        "num_rows": num_rows,
        "row_alignment": 128,
        "max_rows": max_padded_rows(num_rows, 32, 128),
    }
    expected = permute_indices(counts_PE, **sizes)
    actual = permute_indices(counts_PE.cuda(), **sizes)
    for name in ("source_R", "position_R", "offsets_E", "counts_E"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name


def test_permute_indices_never_waits_for_the_device():
    counts_PE = torch.tensor([[3, 0, 5], [1, 2, 0]], device="cuda")
    sizes = {"num_rows": 11, "row_alignment": 16, "max_rows": max_padded_rows(11, 3, 16)}
    permute_indices(counts_PE, **sizes)  # Compiles the kernel.
    torch.cuda.set_sync_debug_mode("error")
    try:
        permute_indices(counts_PE, **sizes)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("shape", [(16, 24), (7, 24), (16, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_grouped_mm_equals_the_slow_loop(dtype, shape, case):
    check_against_the_slow_loop(dtype, shape, case, device="cuda")
