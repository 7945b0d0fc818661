"""All planted bugs, and the gradient gate's result for a layout that trains with one."""

from fnmatch import fnmatchcase

import pytest

from tests.support.gates import Gates
from tests.support.planting import Bug, plant, planted_bugs
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.verify.gradients import gate as gate_module
from titan_moe.verify.gradients.compare import TensorDifference
from titan_moe.verify.gradients.gate import Gate, Result
from titan_moe.verify.gradients.worker import RankReport, Task, verify_on_rank
from titan_moe.verify.layouts.layouts import parse

BUGS = planted_bugs()


def with_bug(bug: Bug, task: Task) -> RankReport:
    """The gate's rank, wrong in one line."""
    plant(bug)
    return verify_on_rank(task)


def judge(
    gate: Gate, bug: Bug, layout: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Result, list[TensorDifference]]:
    """The gate's result for a layout trained with a bug, and all differences."""
    found: list[TensorDifference] = []

    def run_with_bug(fn: object, world_size: int, task: Task, **_: str) -> list[RankReport]:
        reports = run_on_ranks(with_bug, world_size, bug, task)
        found.extend(difference for report in reports for difference in report.wrong)
        return reports

    monkeypatch.setattr(gate_module, "run_on_ranks", run_with_bug)
    return gate.verify(parse(layout)), found


def caught(gates: Gates, bug: Bug, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gates(bug.family, bug.kind)
    result, found = judge(gate, bug, layout, monkeypatch)
    said = "\n".join([*result.lines, result.traceback])
    assert result.status == "failed" and found, said
    for pattern in bug.named:
        assert any(fnmatchcase(line, f"*: {pattern}") for line in result.lines), (pattern, said)
    first = {f"{d.quantity} {d.name}" for d in found if d.step == 0}
    for pattern in bug.spared:
        blamed = [each for each in first if fnmatchcase(each, pattern)]
        assert not blamed, (pattern, blamed, said)
