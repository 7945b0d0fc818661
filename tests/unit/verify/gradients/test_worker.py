"""What a rank of the gate measures."""

import pytest

from titan_moe.verify.gradients.compare import differences
from titan_moe.verify.gradients.worker import scalars


@pytest.mark.parametrize(
    ("ours", "theirs", "error"),
    [
        (3.0, 3.0, 0.0),
        (3.0 * (1 + 1e-8), 3.0, 1e-8),
        (None, None, 0.0),
        (0.5, None, float("inf")),
        (None, 0.5, 1.0),
        (128, 128, 0.0),
    ],
)
def test_numbers_of_a_step_are_compared_in_float64(ours, theirs, error):
    (found,) = differences(0, 0, "loss", [scalars(ours, theirs)], floor=1e-6)
    assert found.error == pytest.approx(error, rel=1e-6)
