"""The gate's ranks with a planted bug or without: the gate's result, and the capture of a step."""

import shutil
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.gates import Gates, gate_of
from tests.support.planting import Bug, plant, planted_bugs
from titan_moe.optim.schedules import set_lr
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training.capture.step import FOLDER, StepCapture
from titan_moe.verify.gradients import gate as gate_module
from titan_moe.verify.gradients.compare import TensorDifference, above_bound
from titan_moe.verify.gradients.fixture import RATES
from titan_moe.verify.gradients.gate import Gate, Result
from titan_moe.verify.gradients.worker import LocalState, RankReport, Task, verify_on_rank
from titan_moe.verify.layouts.layouts import depth, layout_tables, num_sequences, parse
from titan_moe.verify.localize.capture_reader import Capture, read_capture
from titan_moe.verify.localize.localize import Finding, locate

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

    def run_with_bug(fn: object, world_size: int, task: Task, **how: Any) -> list[RankReport]:
        reports = run_on_ranks(with_bug, world_size, bug, task, **how)
        for report in reports:
            found.extend(above_bound(report.differences, task.job.training.dtype))
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


def setting(gate: Gate, text: str, like: str) -> Task:
    """Returns the task of a layout on the model and rows that another layout needs."""
    layout, other = parse(text), parse(like)
    path, _ = gate._fixture(other)
    job, config = gate._setting(other, "float64")
    tables = layout_tables(layout)
    rows = num_sequences(other)
    if layout != other:
        local = rows // layout.data_ranks // 2
        tables["training"] |= {"global_batch_size": rows, "local_batch_size": local}
        tables["parallelism"]["module_fqns_per_model_part"] = None
        assert layout.pp == 1 or depth(layout) == depth(other)
    return Task(job.with_values(**tables), config, layout, path)


def capture_on_rank(task: Task, folder: Path, bug: Bug | None) -> None:
    """Trains the fixture's first step and writes this rank's capture."""
    if bug is not None:
        plant(bug)
    state = LocalState(task)
    assert not state.problems, state.problems
    state.fill()
    capture = StepCapture(state.sharded, state.optimizer, step=1)
    set_lr(state.optimizer, RATES[0])
    state.train_step(state.batches(state.fixture.batches[0]), observer=capture)
    capture.write(folder)


@cache
def _gate(family: str, kind: str, folder: Path) -> Gate:
    folder.mkdir(parents=True, exist_ok=True)
    return gate_of(family, folder, kind)


@cache
def _plain(gate: Gate, layout: str) -> Capture:
    """Returns one plain process's step on the model and rows of a layout."""
    return captured(setting(gate, "dp_shard=1", layout), gate.folder / f"plain {layout}")


def gate_and_localizer(bug: Bug, folder: Path) -> tuple[Result, Finding | None]:
    """Returns the gate's result for a mistake in its layout, and what differs between a step with
    it and one plain process."""
    gate, layout = _gate(bug.family, bug.kind, folder / bug.kind), bug.caught_on
    with pytest.MonkeyPatch.context() as patch:
        result, _ = judge(gate, bug, layout, patch)
    one, other = (
        (depth(each), num_sequences(each)) for each in (parse("dp_shard=1"), parse(layout))
    )
    plain = _plain(gate, "dp_shard=1" if one == other else layout)
    shutil.rmtree(folder / "wrong", ignore_errors=True)
    wrong = captured(setting(gate, layout, layout), folder / "wrong", bug)
    return result, locate(plain, wrong)


def captured(task: Task, folder: Path, bug: Bug | None = None) -> Capture:
    """Returns the capture of the fixture's first step, from all ranks."""
    run_on_ranks(capture_on_rank, task.layout.world_size, task, folder, bug)
    return read_capture(folder / FOLDER)
