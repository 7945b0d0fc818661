"""The trainings that a noise band is measured from: the same one, in other orders of summation."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from titan_moe.build import ShardedModel, build_sharded_model
from titan_moe.config.checks import check
from titan_moe.config.errors import ConfigError
from titan_moe.config.job import JobConfig
from titan_moe.data.build import build_loader
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.models.config import ModelConfig
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.optim.schedules import lr_factor, set_lr
from titan_moe.train_step import TrainStep
from titan_moe.verify.layouts import Layout, overrides, parse
from titan_moe.verify.noise_band import Curve
from titan_moe.verify.on_rank import own_batches
from titan_moe.verify.ranks import run_ranks
from titan_moe.verify.reference import Rows

SMALL_LAYOUTS = ("dp_shard=2", "dp_shard=2,ep=2", "tp=2", "cp=2", "tp=2,etp=2", "cp=2,tp=2,ep=4")
"""Proven in float64 by the gate; each adds up in orders of its own."""

DTYPES: Mapping[str, dict[str, str]] = {
    "float32": {"dtype": "float32", "mixed_precision_param": "float32"},
    "bfloat16": {"dtype": "float32", "mixed_precision_param": "bfloat16"},
}
"""What forward and backward compute in; parameters and reductions are in float32."""

_TIMEOUT_S = 1800  # Ranks say nothing before their last step.


@dataclass(frozen=True)
class Run:
    """One training of a job."""

    layout: Layout = field(default_factory=Layout)
    order: int = 0
    """Seed of the order of each global batch's rows; 0 leaves them as they come."""
    local_batch_size: int | None = None
    """Rows of a microbatch; left out, as the job says, or all rows of the rank if fewer."""
    alter: Callable[[ShardedModel, TrainStep], None] | None = None
    """Called on every rank before the first step, to plant a mistake; a module's top-level
    function."""

    def __str__(self) -> str:
        rows = "" if self.local_batch_size is None else f",rows={self.local_batch_size}"
        return f"{self.layout}{rows}" + (f",order={self.order}" if self.order else "")


def harmless_runs(job: JobConfig, config: ModelConfig, number: int) -> list[Run]:
    """`number` runs that differ by rounding only.

    They take turns: the rows of a global batch in another order on one rank, in microbatches of
    another size, and small layouts, these too with their rows in another order. A sum over rows
    does not depend on their order, nor does any statistic of the step; only its rounding does.
    """
    rows = job.training.global_batch_size
    sizes = [rows // pieces for pieces in (1, 2, 4) if rows % pieces == 0]
    layouts = [x for x in map(parse, SMALL_LAYOUTS) if not refusal(job, config, Run(x))]
    found = []
    for order in range(1, number + 1):
        turn, alone = divmod(order - 1, 2)
        if alone or not layouts:
            found.append(Run(order=order, local_batch_size=sizes[turn % len(sizes)]))
        else:
            found.append(Run(layouts[turn % len(layouts)], order))
    return found


def train(job: JobConfig, config: ModelConfig, run: Run) -> Curve:
    """Train all steps of the job; loss and gradient norm of each. Raises ConfigError."""
    if lines := refusal(job, config, run):
        raise ConfigError([f"{run}: {line}" for line in lines])
    task = setting(job, run), config, run, _global_batches(job, run.order)
    results = run_ranks(_train_on_rank, run.layout.world_size, *task, timeout_s=_TIMEOUT_S)
    loss, grad_norm = np.array(results[0]).T
    return Curve(str(run), range(1, job.training.steps + 1), loss, grad_norm)


def setting(job: JobConfig, run: Run) -> JobConfig:
    """The job of a run."""
    tables = overrides(run.layout)
    rows = job.training.global_batch_size // run.layout.data_ranks
    # A pipeline takes all its rows in one run of its schedule.
    local = rows if run.layout.pp > 1 else min(rows, job.training.local_batch_size)
    tables["training"] = {"local_batch_size": run.local_batch_size or local}
    tables["parallelism"] |= {
        "module_fqns_per_model_part": None,
        "pipeline_parallel_microbatch_size": 1,
    }
    merged = job.model_dump()
    for table, values in tables.items():
        merged[table] |= values
    return JobConfig.model_validate(merged)


def with_dtype(job: JobConfig, dtype: str) -> JobConfig:
    """The job computing in float32 or bfloat16."""
    training = job.training.model_copy(update=DTYPES[dtype])
    return job.model_copy(update={"training": training})


def refusal(job: JobConfig, config: ModelConfig, run: Run) -> Sequence[str]:
    """Why the configuration's checks refuse a run; nothing if they do not."""
    return check(setting(job, run), config, run.layout.world_size, num_gpus=0)


def _global_batches(job: JobConfig, order: int) -> list[tuple[np.ndarray, ...]]:
    """Tokens, labels and documents of all rows of each step, the rows in the order of that seed.

    Read here and not by each rank, and as arrays, for tensors would travel as file handles.
    """
    training = job.training
    rows = training.global_batch_size
    loader = build_loader(
        training.model_copy(update={"local_batch_size": rows}),
        load_tokenizer(job.model.tokenizer_path),
        seed=job.debug.seed,
        rank=0,
        num_ranks=1,
        global_batch_size=rows,
    )
    shuffle = np.random.default_rng(order).permutation if order else np.arange
    found = []
    for _ in range(training.steps):
        (batch,) = loader.next_step()
        place_B = shuffle(rows)
        whole = batch.tokens_BS, batch.labels_BS, batch.documents_BS
        found.append(tuple(x.numpy()[place_B] for x in whole))
    loader.close()
    return found


def _train_on_rank(
    job: JobConfig, config: ModelConfig, run: Run, batches: list[tuple[np.ndarray, ...]]
) -> list[tuple[float, float]]:
    warnings.simplefilter("ignore", FutureWarning)
    layout, training, cpu = run.layout, job.training, torch.device("cpu")
    sharded = build_sharded_model(job, config, device=cpu, world_size=layout.world_size)
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters())
    step_fn = TrainStep(sharded, optimizer, training, device=cpu)
    if run.alter is not None:
        run.alter(sharded, step_fn)
    place = sharded.meshes.dims.coordinate(dist.get_rank(), "batch")
    curve = []
    for step, arrays in enumerate(batches, 1):
        rows = Rows(*map(torch.from_numpy, arrays))
        set_lr(optimizer, lr_factor(step, job.lr_scheduler, training.steps))
        result = step_fn(own_batches(rows, training.local_batch_size, place, layout.data_ranks))
        curve.append((result.loss, result.grad_norm))
        if not result.finite:
            break
    return curve + [(math.nan, math.nan)] * (len(batches) - len(curve))
