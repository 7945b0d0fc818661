"""The gradient gate finds mistakes of one line, names the tensor, and blames nothing else."""

import pytest

from tests.support.catching import BUGS, caught, judge
from tests.support.gates import Gates
from tests.support.tiers import split


@pytest.mark.parametrize("name", split(BUGS, [name for name, bug in BUGS.items() if bug.quick]))
def test_gate_catches_planted_bug(gates: Gates, name: str, monkeypatch):
    caught(gates, BUGS[name], BUGS[name].caught_on, monkeypatch)


HARMLESS = [name for name, bug in BUGS.items() if bug.harmless_on]


@pytest.mark.parametrize("name", split(HARMLESS, HARMLESS[:1], []))
def test_gate_passes_layout_without_the_bug_s_axis(gates: Gates, name: str, monkeypatch):
    bug = BUGS[name]
    result, _ = judge(gates(bug.family, bug.kind), bug, bug.harmless_on, monkeypatch)
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.slow
def test_gate_reports_dead_rank_in_one_line(gates: Gates, monkeypatch):
    """A recomputation that counts its tokens again."""
    bug = BUGS["recompute routes anew"]._replace(wrong="return choose(given)")
    result, _ = judge(gates(bug.family), bug, bug.caught_on, monkeypatch)
    (line,) = result.lines
    assert "RuntimeError: a recomputed forward changed moe.rows_sent, moe.router.tok" in line
