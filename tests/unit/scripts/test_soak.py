"""A run that leaks is found, and only what is shown to be flat is called flat."""

from math import nan
from pathlib import Path

import pytest

from scripts.bench import soak as script
from scripts.bench.slopes import FLAT, GROWS, UNCLEAR, Slope, slope
from tests.support.paths import REPO


@pytest.mark.parametrize(
    ("low", "per_1000", "high", "verdict"),
    [
        (-3, -2, -1, FLAT),
        (0, 0, 1, FLAT),
        (0.1, 1.5, 2, GROWS),
        (-1, 0.5, 2, UNCLEAR),
        (-1, nan, 0, UNCLEAR),
    ],
)
def test_verdict_of_a_slope(low: float, per_1000: float, high: float, verdict: str) -> None:
    assert Slope("x", "", 0, 0, per_1000, low, high, 1.0).verdict == verdict


def test_slope_is_the_median_between_blocks_of_samples() -> None:
    steps = [10.0 * n for n in range(240)]
    values = [5 + step / 500 for step in steps]
    exact = slope("x", "", 1.0, steps, values)
    assert exact[4:7] == pytest.approx((2.0, 2.0, 2.0)) and exact.verdict == GROWS
    values[3:9] = [nan] * 6
    assert slope("x", "", 3.0, steps, values).verdict == UNCLEAR


_LEAK = """
import os, threading
_fsync, _kept = os.fsync, []
def fsync(handle):
    _kept.append(bytearray(b"x" * 100_000))
    os.dup(handle)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    _fsync(handle)
os.fsync = fsync
"""


@pytest.mark.slow
def test_run_that_leaks_is_found(tmp_path: Path) -> None:
    """A list grows, a file stays open and a thread is never joined at each file that is saved."""
    (tmp_path / "sitecustomize.py").write_text(_LEAK)
    record = script.soak(
        tmp_path / "run",
        steps=80,
        ranks=2,
        interval=2,
        environment={"PYTHONPATH": f"{tmp_path}:{REPO}"},
    )
    rows = {row.name: row for row in script.judge(record)}
    wanted = {"memory, rank 0", "memory, rank 1", "open files", "threads"}
    assert {name for name, row in rows.items() if row.verdict == GROWS} >= wanted
    for name in ("processes", "files of the run"):  # Few samples may not show that it is flat.
        assert rows[name].verdict != GROWS
    assert record["left"] == []
