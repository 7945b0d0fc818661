"""The gradient gate finds mistakes of one line, names the tensor, and blames nothing else."""

import re
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from tests.distributed.conftest import Gates
from tests.distributed.planted_bugs import BUGS as COMMON_BUGS
from tests.distributed.planted_bugs import Bug, plant
from tests.distributed.planted_dispatch_bugs import DISPATCH_BUGS
from tests.distributed.planted_family_bugs import FAMILY_BUGS
from tests.distributed.test_gate import SAMPLE
from titan_moe.testing.ranks import run_ranks
from titan_moe.verify.gradients import gate as gate_module
from titan_moe.verify.gradients import worker
from titan_moe.verify.gradients.compare import TensorDifference
from titan_moe.verify.gradients.gate import Gate, Result
from titan_moe.verify.gradients.worker import RankReport, Task, verify_on_rank
from titan_moe.verify.layouts.layouts import AXES, OPTIONS, Layout, parse

BUGS = COMMON_BUGS | FAMILY_BUGS | DISPATCH_BUGS


def with_bug(bug: Bug, task: Task) -> RankReport:
    """The gate's rank, wrong in one line; tells all differences."""
    plant(bug)
    worker._MOST_SHOWN = 10**6
    return verify_on_rank(task)


def judge(
    gate: Gate, bug: Bug, layout: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Result, list[TensorDifference]]:
    """What the gate says of a layout trained with a bug, and all that it found."""
    found: list[TensorDifference] = []

    def run_with_bug(fn: object, world_size: int, task: Task) -> list[RankReport]:
        verdicts = run_ranks(with_bug, world_size, bug, task)
        found.extend(difference for verdict in verdicts for difference in verdict.wrong)
        return [replace(v, wrong=v.wrong[: worker._MOST_SHOWN]) for v in verdicts]

    monkeypatch.setattr(gate_module, "run_ranks", run_with_bug)
    return gate.verify(parse(layout)), found


def caught(gates: Gates, bug: Bug, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gates(bug.family)
    result, found = judge(gate, bug, layout, monkeypatch)
    said = "\n".join([*result.lines, result.traceback])
    assert result.status == "failed" and result.num_wrong, said
    for pattern in bug.named:
        assert any(fnmatchcase(line, f"*: {pattern}") for line in result.lines), (pattern, said)
    first = {f"{d.quantity} {d.name}" for d in found if d.step == 0}
    for pattern in bug.spared:
        blamed = [each for each in first if fnmatchcase(each, pattern)]
        assert not blamed, (pattern, blamed, said)


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
    wrong = "return lambda scores_BSE: moe.decide(scores_BSE.bfloat16())"
    bug = BUGS["recompute routes anew"]._replace(wrong=wrong)
    result, _ = judge(gates(bug.family), bug, bug.caught_on, monkeypatch)
    (line,) = result.lines
    assert "CheckpointError: " in line and "different metadata" in line
