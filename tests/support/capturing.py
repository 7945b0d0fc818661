"""One captured step of a gate's fixture in a layout, with a mistake or without."""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.support.planting import Bug, plant
from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.parallelize import build_sharded_model
from titan_moe.models.config import ModelConfig
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.optim.schedules import set_lr
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.train_step import TrainStep
from titan_moe.verify.gradients.compare import TOLERANCES
from titan_moe.verify.gradients.fixture import RATES, Fixture
from titan_moe.verify.gradients.gate import Gate
from titan_moe.verify.gradients.worker import LocalState, Task, own_batches
from titan_moe.verify.layouts.layouts import (
    Layout,
    depth,
    layout_tables,
    num_rows,
    parse,
    with_tables,
)
from titan_moe.verify.localize.capture.step import FOLDER, StepCapture
from titan_moe.verify.localize.capture_reader import Capture, read_capture


class Setting(NamedTuple):
    """What a layout trains, and who it is compared with: the same model on the same rows."""

    layout: Layout
    job: JobConfig
    config: ModelConfig
    fixture: Path


def setting(gate: Gate, text: str, like: str) -> Setting:
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
    return Setting(layout, with_tables(job, tables), config, path)


def capture_on_rank(task: Setting, folder: Path, bug: Bug | None) -> None:
    """Train the fixture's first step and write this rank's capture."""
    if bug is not None:
        plant(bug)
    fixture: Fixture = torch.load(task.fixture, mmap=True, weights_only=False)
    device, job, layout = torch.device("cpu"), task.job, task.layout
    sharded = build_sharded_model(job, task.config, device=device, world_size=dist.get_world_size())
    state = LocalState(
        sharded, Task(job, task.config, layout, task.fixture, TOLERANCES["float64"]), fixture
    )
    assert not state.problems, state.problems
    state.fill(fixture)
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters())
    train = TrainStep(sharded, optimizer, job.training, device=device)
    set_lr(optimizer, RATES[0])
    place = state.shards.coordinate(state.rank, "dp_replicate") * layout.dp_shard
    place += state.shards.coordinate(state.rank, "dp_shard")
    batches = own_batches(
        fixture.batches[0], job.training.local_batch_size, place, layout.data_ranks
    )
    capture = StepCapture(sharded, optimizer, step=1, compute_dtype="float64")
    train(batches, observer=capture)
    capture.write(folder)


def captured(task: Setting, folder: Path, bug: Bug | None = None) -> Capture:
    """The whole step."""
    run_on_ranks(capture_on_rank, task.layout.world_size, task, folder, bug)
    return read_capture(folder / FOLDER)
