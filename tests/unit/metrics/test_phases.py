"""Phases with a clock of our own."""

import pytest

from titan_moe.metrics.phases import Phases


def test_adds_up_until_taken():
    ticks = iter([0.0, 2.0, 10.0, 10.5, 20.0, 23.0, 30.0, 31.0])
    phases = Phases(clock=lambda: next(ticks))
    with phases("data"):
        pass
    with phases("forward"):
        pass
    with phases("data"):
        pass
    assert phases.take() == {"time/data": 5.0, "time/forward": 0.5}
    with phases("data"):
        pass
    assert phases.take() == {"time/data": 1.0}
    assert phases.take() == {}


def test_counts_a_phase_that_raises():
    ticks = iter([0.0, 2.0])
    phases = Phases(clock=lambda: next(ticks))
    with pytest.raises(StopIteration), phases("data"):
        raise StopIteration
    assert phases.take() == {"time/data": 2.0}
