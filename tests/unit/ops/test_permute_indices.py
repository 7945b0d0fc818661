"""permute_indices against a slow loop: the torch reference and the interpreted Triton kernel."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.permute_cases import ALIGNMENTS, cases, check
from titan_moe.ops.permute_indices import max_padded_rows, permute_indices


@pytest.mark.parametrize("row_alignment", ALIGNMENTS)
def test_reference_equals_the_slow_loop(row_alignment):
    for counts, unused in cases():
        check(counts, unused, row_alignment)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6).flatmap(
        lambda experts: st.lists(
            st.lists(st.integers(0, 40), min_size=experts, max_size=experts), min_size=1, max_size=5
        )
    ),
    st.sampled_from(ALIGNMENTS),
    st.integers(0, 3),
)
def test_reference_equals_the_slow_loop_on_any_counts(counts, row_alignment, unused):
    check(counts, unused, row_alignment)


def test_maps_are_inverse_and_gather_what_they_say():
    counts_PE = torch.tensor([[2, 0, 3], [1, 4, 0]])
    indices = permute_indices(counts_PE, num_rows=10, row_alignment=4, max_rows=16)
    arrived_R = torch.tensor([0, 0, 2, 2, 2, 0, 1, 1, 1, 1])  # the expert of each row
    padded_R = torch.where(indices.source_R >= 0, arrived_R[indices.source_R.clamp(min=0)], -1)
    assert padded_R.tolist() == [0, 0, 0, -1, 1, 1, 1, 1, 2, 2, 2, -1, -1, -1, -1, -1]
    assert torch.equal(padded_R[indices.position_R], arrived_R)


def test_counts_may_be_a_strided_view():
    counts_EP = torch.tensor([[2, 1], [0, 4], [3, 0]])
    sizes = {"num_rows": 10, "row_alignment": 1, "max_rows": 10}
    view = permute_indices(counts_EP.T, **sizes)
    copy = permute_indices(counts_EP.T.contiguous(), **sizes)
    assert torch.equal(view.source_R, copy.source_R)


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "row_alignment", "expected"),
    [
        (0, 4, 16, 64),
        (1, 4, 16, 64),
        (3, 8, 16, 128),
        (10, 2, 1, 10),
        (10, 2, 8, 24),
        (17, 2, 16, 48),
    ],
)
def test_max_padded_rows(num_rows, num_experts, row_alignment, expected):
    assert max_padded_rows(num_rows, num_experts, row_alignment) == expected


def test_triton_kernel_in_the_interpreter_equals_the_slow_loop():
    pytest.importorskip("triton")
    # A process of its own: Triton reads the variable when it is imported.
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret_permute_indices"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 60
