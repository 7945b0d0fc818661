"""Peaks of memory that others have published, beside the estimate."""

from statistics import median

import pytest

from scripts.bench.memory_rows import BOUND, GIB, ROWS, Comparison, compare
from titan_moe.parallelize import memory_table
from titan_moe.parallelize.memory_table import Table
from titan_moe.runtime.gpus import GPUS

_FAR = 1.5
"""Bound of errors whose reason cannot be counted."""
_BIAS = 0.05
"""Bound of the median error."""


def _left(found: Comparison) -> float:
    """Returns the error; beyond the bound, that which is left with what theirs has otherwise."""
    error = found.error()
    return error if abs(error) <= BOUND else found.error(counted=True)


def _unexplained() -> tuple[list[str], float]:
    """Returns the rows that differ without a reason in the data, and the median error of peaks."""
    rows = [compare(row) for row in ROWS if not row.open]
    peaks = [found for found in rows if not {"fits", "short"} & {*found.row.gib}]
    wrong = [f"{found.row}: {found.error():+.2f}" for found in rows if abs(_left(found)) > BOUND]
    return wrong, median(map(_left, peaks))


def test_errors_of_published_peaks_are_small_or_have_a_reason() -> None:
    wrong, bias = _unexplained()
    assert not wrong
    assert abs(bias) < _BIAS
    found = list(map(compare, ROWS))
    assert [len(found), sum(abs(each.error()) <= BOUND for each in found)] == [64, 40]
    assert all(each.reasons and all(each.reasons) for each in found if abs(each.error()) > BOUND)
    uncounted = [abs(_left(each)) for each in found if each.row.open]
    assert min(uncounted) > BOUND and max(uncounted) < _FAR, "a reason without an error, or too far"


def test_published_layouts_without_room_have_none() -> None:
    rows = [row for row in ROWS if row.source == "xtuner, H800" and "short" in row.gib]
    assert [row.degrees for row in rows] == [{"pp": 8, "tp": 2, "ep": 8}, {"pp": 32, "ep": 8}]
    for found in map(compare, rows):
        assert found.estimate.needed + min(found.more, 0.0) > GPUS["H100"].memory + GIB


@pytest.mark.parametrize(
    ("line", "share"), [("weights", 0.0), ("gradients", 0.0), ("moments", 0.5)]
)
def test_published_peaks_show_a_planted_mistake(
    line: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = memory_table._of_parameters

    def forgetful(*args) -> Table:
        table = right(*args)
        table["stored"][line] *= share
        return table

    monkeypatch.setattr(memory_table, "_of_parameters", forgetful)
    wrong, bias = _unexplained()
    assert wrong and bias < -_BIAS
