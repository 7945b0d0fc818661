"""Comparison: what is equal, what is not, and what a ratio gives away."""

import math

import pytest
import torch

from titan_moe.verify.gradients.compare import TensorDifference, compare, fingerprint
from titan_moe.verify.gradients.worker import scalar

AXES = {"pp": 1, "tp": 2, "ep": 4}


def difference(ours, theirs, least_norm=1e-6) -> TensorDifference:
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (ours, theirs))
    return compare((0, 3, "gradient", "w"), *tensors, least_norm=least_norm)


def test_equal_tensors_are_at_distance_0():
    assert difference([1.0, 2.0], [1.0, 2.0]).error == 0
    assert difference([0.0, 0.0], [0.0, 0.0], least_norm=0.0).error == 0
    assert difference([], []).error == 0


def test_tensor_whose_reference_is_zero_must_be_zero():
    assert difference([1e-30], [0.0], least_norm=0.0).error == math.inf


def test_errors_are_relative_to_the_part_or_to_a_least_share_of_the_whole():
    assert difference([1.0 + 1e-8], [1.0]).error == pytest.approx(1e-8, rel=1e-4)
    assert difference([2e-12], [1e-12]).error == pytest.approx(1e-6)
    assert difference([2e-3], [1e-3], least_norm=1.0).error == pytest.approx(1e-3)


@pytest.mark.parametrize("ours", [[math.nan, 1.0], [math.inf, 1.0], [1.0, 1.0, 1.0]])
def test_nan_and_other_shapes_are_infinitely_far(ours):
    assert difference(ours, [1.0, 1.0]).error == math.inf


@pytest.mark.parametrize(
    "ratio, told",
    [
        (2.0, "exactly 2, the fingerprint of a sum reduced twice"),
        (0.5, "exactly 1/2, the fingerprint of a sum not reduced, or averaged over tp"),
        (4.0, "over ep"),
        (1.9, ""),
        (math.nan, ""),
    ],
)
def test_fingerprint_names_the_missing_or_doubled_reduction(ratio: float, told: str):
    found = fingerprint(ratio, AXES)
    assert told in found if told else found == ""


@pytest.mark.parametrize(
    ("ours", "theirs", "error"),
    [(3.0 * (1 + 1e-8), 3.0, 1e-8), (None, 3.0, 1.0), (3, 3.0, 0.0), (0.5, None, math.inf)],
)
def test_numbers_are_compared_in_float64_and_lacking_ones_are_far(ours, theirs, error: float):
    found = compare((0, 0, "loss", ""), scalar(ours), scalar(theirs), least_norm=0.0)
    assert found.error == pytest.approx(error, rel=1e-6)
