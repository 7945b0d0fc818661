"""One captured step of a gate's case in a layout, with a mistake or without."""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.support.planted_bugs import Bug, plant
from titan_moe.config.job_config import JobConfig
from titan_moe.debug.capture.step import FOLDER, StepCapture
from titan_moe.distributed.parallelize import build_sharded_model
from titan_moe.models.config import ModelConfig
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.optim.schedules import set_lr
from titan_moe.testing.ranks import run_ranks
from titan_moe.train_step import TrainStep
from titan_moe.verify.gradients.compare import TOLERANCES
from titan_moe.verify.gradients.fixture import RATES, Case
from titan_moe.verify.gradients.gate import Gate
from titan_moe.verify.gradients.worker import Holding, Task, own_batches
from titan_moe.verify.layouts.layouts import Layout, depth, num_rows, overrides, parse
from titan_moe.verify.localize.capture_reader import Captured, read_capture


class Setting(NamedTuple):
    """What a layout trains, and who it is compared with: the same model on the same rows."""

    layout: Layout
    job: JobConfig
    config: ModelConfig
    case: Path


def setting(gate: Gate, text: str, like: str) -> Setting:
    """A layout on the model and rows that another one needs."""
    layout, other = parse(text), parse(like)
    path, _ = gate._case(other)
    job, config = gate._setting(other, "float64")
    tables = overrides(layout)
    rows = num_rows(other)
    if layout != other:
        local = rows // layout.data_ranks // 2
        tables["training"] |= {"global_batch_size": rows, "local_batch_size": local}
        tables["parallelism"]["module_fqns_per_model_part"] = None
        assert layout.pp == 1 or depth(layout) == depth(other)
    merged = job.model_dump()
    for table, values in tables.items():
        merged[table] |= values
    return Setting(layout, JobConfig.model_validate(merged), config, path)


def capture_on_rank(task: Setting, folder: Path, bug: Bug | None) -> None:
    """Train the case's first step and write this rank's capture."""
    if bug is not None:
        plant(bug)
    case: Case = torch.load(task.case, mmap=True, weights_only=False)
    device, job, layout = torch.device("cpu"), task.job, task.layout
    sharded = build_sharded_model(job, task.config, device=device, world_size=dist.get_world_size())
    holding = Holding(
        sharded, Task(job, task.config, layout, task.case, TOLERANCES["float64"]), case
    )
    assert not holding.problems, holding.problems
    holding.fill(case)
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters())
    train = TrainStep(sharded, optimizer, job.training, device=device)
    set_lr(optimizer, RATES[0])
    place = holding.shards.coordinate(holding.rank, "dp_replicate") * layout.dp_shard
    place += holding.shards.coordinate(holding.rank, "dp_shard")
    batches = own_batches(case.batches[0], job.training.local_batch_size, place, layout.data_ranks)
    capture = StepCapture(sharded, optimizer, step=1, compute_dtype="float64")
    train(batches, observer=capture)
    capture.write(folder)


def captured(task: Setting, folder: Path, bug: Bug | None = None) -> Captured:
    """The whole step."""
    run_ranks(capture_on_rank, task.layout.world_size, task, folder, bug)
    return read_capture(folder / FOLDER)
