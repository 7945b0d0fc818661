"""The gradient gate finds mistakes of one line, names the tensor, and blames nothing else."""

import re
from fnmatch import fnmatchcase

import pytest

from tests.support.catching import BUGS, caught, judge
from tests.support.gates import SAMPLE, Gates
from tests.support.planted_bugs import Bug
from titan_moe.verify.layouts.layouts import AXES, OPTIONS, Layout, parse


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(gates: Gates, name: str, monkeypatch):
    caught(gates, BUGS[name], BUGS[name].caught_on, monkeypatch)


@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.harmless_on])
def test_a_layout_without_its_axis_passes(gates: Gates, name: str, monkeypatch):
    bug = BUGS[name]
    result, _ = judge(gates(bug.family), bug, bug.harmless_on, monkeypatch)
    assert result.passed, "\n".join([*result.lines, result.traceback])


def holds(sampled: Layout, layout: Layout) -> bool:
    """Whether a layout is a sampled one with fewer ranks, and fewer axes."""
    return all(sampled.size(axis) >= layout.size(axis) for axis in AXES) and all(
        getattr(sampled, option) == getattr(layout, option)
        for option in OPTIONS
        if layout.has(option)
    )


def in_the_sample(bug: Bug) -> list[str]:
    return [text for text in SAMPLE if holds(parse(text), parse(bug.caught_on))]


@pytest.mark.parametrize("name", BUGS)
def test_the_sample_has_what_a_bug_shows_on(name: str):
    assert in_the_sample(BUGS[name])


@pytest.mark.full
@pytest.mark.parametrize("name", BUGS)
def test_the_sample_itself_catches_it(gates: Gates, name: str, monkeypatch):
    text, *_ = in_the_sample(BUGS[name])
    result, found = judge(gates(BUGS[name].family), BUGS[name], text, monkeypatch)
    assert result.status == "failed"
    for pattern in BUGS[name].named:
        # Of more ranks, another ratio.
        quantity = re.sub("^step 0, rank 1: ", "", pattern).rstrip("*").split("exactly")[0]
        assert any(fnmatchcase(f"{d.quantity} {d.name}", f"{quantity}*") for d in found), pattern


def test_a_rank_that_dies_is_told_in_a_line(gates: Gates, monkeypatch):
    """Recompute with another plan than the forward's: torch itself finds other shapes."""
    wrong = "return route(scores_BSE.bfloat16())"
    bug = BUGS["recompute routes anew"]._replace(wrong=wrong)
    result, _ = judge(gates(bug.family), bug, bug.caught_on, monkeypatch)
    (line,) = result.lines
    assert "CheckpointError: " in line and "different metadata" in line
