"""permute_indices in plain torch against a slow loop."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.permute_cases import ALIGNMENTS, check
from titan_moe.ops.permute_indices import max_padded_rows


@settings(max_examples=60)
@given(
    st.integers(1, 6).flatmap(
        lambda experts: st.lists(
            st.lists(st.integers(0, 40), min_size=experts, max_size=experts), min_size=1, max_size=5
        )
    ),
    st.sampled_from(ALIGNMENTS),
    st.integers(0, 3),
)
def test_permute_indices_equals_a_slow_loop_on_any_counts(counts, row_alignment, unused):
    check(counts, unused, row_alignment)


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
def test_max_padded_rows_equals_counted_rows(num_rows, num_experts, row_alignment, expected):
    assert max_padded_rows(num_rows, num_experts, row_alignment) == expected
