"""One captured step of a gate's fixture in a layout, with a mistake or without."""

from pathlib import Path

from tests.support.planting import Bug, plant
from titan_moe.optim.schedules import set_lr
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.verify.gradients.fixture import RATES
from titan_moe.verify.gradients.gate import Gate
from titan_moe.verify.gradients.worker import LocalState, Task
from titan_moe.verify.layouts.layouts import (
    depth,
    layout_tables,
    num_rows,
    parse,
    with_tables,
)
from titan_moe.verify.localize.capture.step import FOLDER, StepCapture
from titan_moe.verify.localize.capture_reader import Capture, read_capture


def setting(gate: Gate, text: str, like: str) -> Task:
    """A layout on the model and rows that another one needs."""
    layout, other = parse(text), parse(like)
    path, _ = gate._fixture(other)
    job, config = gate._setting(other, "float64")
    tables = layout_tables(layout)
    rows = num_rows(other)
    if layout != other:
        local = rows // layout.data_ranks // 2
        tables["training"] |= {"global_batch_size": rows, "local_batch_size": local}
        tables["parallelism"]["module_fqns_per_model_part"] = None
        assert layout.pp == 1 or depth(layout) == depth(other)
    return Task(with_tables(job, tables), config, layout, path)


def capture_on_rank(task: Task, folder: Path, bug: Bug | None) -> None:
    """Train the fixture's first step and write this rank's capture."""
    if bug is not None:
        plant(bug)
    state = LocalState(task)
    assert not state.problems, state.problems
    state.fill()
    capture = StepCapture(state.sharded, state.optimizer, step=1, compute_dtype="float64")
    set_lr(state.optimizer, RATES[0])
    state.train_step(state.batches(state.fixture.batches[0]), observer=capture)
    capture.write(folder)


def captured(task: Task, folder: Path, bug: Bug | None = None) -> Capture:
    """The whole step."""
    run_on_ranks(capture_on_rank, task.layout.world_size, task, folder, bug)
    return read_capture(folder / FOLDER)
