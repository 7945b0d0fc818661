"""The trainings that a noise band is measured from: the same one, in other orders of summation."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titan_moe.config.checks.job import check
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.data.build import build_loader
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.distributed.parallelize import ShardedModel, build_sharded_model
from titan_moe.models.config import ModelConfig
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.optim.schedules import lr_factor, set_lr
from titan_moe.testing.ranks import run_on_ranks
from titan_moe.train_step import StepResult, TrainStep
from titan_moe.verify.compare.records import LOAD_OF, NORM_OF, Curve
from titan_moe.verify.layouts.layouts import Layout, layout_tables, parse, with_tables

SMALL_LAYOUTS = ("dp_shard=2", "dp_shard=2,ep=2", "tp=2", "cp=2", "tp=2,etp=2", "cp=2,tp=2,ep=4")
"""Proven in float64 by the gate; each adds up in orders of its own."""

DTYPES: Mapping[str, dict[str, str]] = {
    "float32": {"dtype": "float32", "mixed_precision_param": "float32"},
    "bfloat16": {"dtype": "float32", "mixed_precision_param": "bfloat16"},
}
"""What forward and backward compute in; parameters and reductions are in float32."""

_TIMEOUT_S = 1800  # Ranks report nothing before their last step.


@dataclass(frozen=True)
class Run:
    """One training of a job."""

    layout: Layout = field(default_factory=Layout)
    order: int = 0
    """debug.permute_rows: seed of the order of each global batch's rows; 0: as they come."""
    local_batch_size: int | None = None
    """Rows of a microbatch; left out, as the job says, or all rows of the rank if fewer."""
    alter: Callable[[ShardedModel, TrainStep], None] | None = None
    """Called on every rank before the first step, to plant a mistake; a module's top-level
    function."""

    def __str__(self) -> str:
        rows = "" if self.local_batch_size is None else f",rows={self.local_batch_size}"
        return f"{self.layout}{rows}" + (f",order={self.order}" if self.order else "")


def control_runs(
    job: JobConfig, config: ModelConfig, number: int, *, first: int = 1, most_ranks: int = 4
) -> list[Run]:
    """`number` runs that differ by rounding only, those with other `first` numbers by other orders.

    They take turns: the rows of a global batch in another order, in microbatches of each size, and
    in a small layout. A sum over rows does not depend on their order, nor does any statistic of the
    step; only its rounding does.
    """
    rows = job.training.global_batch_size
    sizes = [rows // pieces for pieces in (1, 2, 4) if rows % pieces == 0]
    layouts = [layout for layout in map(parse, SMALL_LAYOUTS) if layout.world_size <= most_ranks]
    layouts = [layout for layout in layouts if not refusal(job, config, Run(layout))]
    found = []
    for order in range(first, first + number):
        turn, kind = divmod(order - 1, len(sizes) + 1)
        if kind == len(sizes) and layouts:
            found.append(Run(layouts[turn % len(layouts)], order))
        else:
            found.append(Run(order=order, local_batch_size=sizes[kind % len(sizes)]))
    return found


def train(job: JobConfig, config: ModelConfig, run: Run, *, parameter_norms: bool = False) -> Curve:
    """Train all steps of the job: loss, gradient norm and rows per expert of each, and every
    parameter's gradient norm if asked for. Raises ConfigError."""
    return train_each([(job, run)], config, parameter_norms=parameter_norms)[0]


def train_each(
    trainings: Sequence[tuple[JobConfig, Run]], config: ModelConfig, *, parameter_norms: bool
) -> list[Curve]:
    """`train` for one after the other in the same processes, which costs less; their layouts have
    the same number of ranks."""
    for job, run in trainings:
        if lines := refusal(job, config, run):
            raise ConfigError([f"{run}: {line}" for line in lines])
    tasks = [(setting(job, run), run) for job, run in trainings]
    (world_size,) = {run.layout.world_size for _, run in tasks}
    found = run_on_ranks(
        _train_on_rank, world_size, tasks, config, parameter_norms, timeout_s=_TIMEOUT_S
    )[0]
    return [
        _curve(str(run), job.training.steps, *measured)
        for (job, run), measured in zip(tasks, found, strict=True)
    ]


def setting(job: JobConfig, run: Run) -> JobConfig:
    """The job of a run."""
    rows = job.training.global_batch_size // run.layout.data_ranks
    # A pipeline takes all its rows in one run of its schedule.
    local = rows if run.layout.pp > 1 else min(rows, job.training.local_batch_size)
    parallelism = layout_tables(run.layout)["parallelism"] | {
        "module_fqns_per_model_part": None,
        "pipeline_parallel_microbatch_size": 1,
    }
    tables = {
        "parallelism": parallelism,
        "activation_checkpoint": layout_tables(run.layout)["activation_checkpoint"],
        "training": {"local_batch_size": run.local_batch_size or local},
        "debug": {"permute_rows": run.order},
    }
    return with_tables(job, tables)


def with_dtype(job: JobConfig, dtype: str) -> JobConfig:
    """The job computing in float32 or bfloat16."""
    training = job.training.model_copy(update=DTYPES[dtype])
    return job.model_copy(update={"training": training})


def refusal(job: JobConfig, config: ModelConfig, run: Run) -> Sequence[str]:
    """Why the configuration's checks refuse a run; nothing if they do not."""
    return check(setting(job, run), config, run.layout.world_size, num_gpus=0)


def _train_on_rank(
    tasks: Sequence[tuple[JobConfig, Run]], config: ModelConfig, parameter_norms: bool
) -> list[tuple[list[str], list[StepResult]]]:
    warnings.simplefilter("ignore", FutureWarning)
    return [_train_one(job, config, run, parameter_norms) for job, run in tasks]


def _train_one(
    job: JobConfig, config: ModelConfig, run: Run, parameter_norms: bool
) -> tuple[list[str], list[StepResult]]:
    """The MoE layers' names, and what each step measured up to the first that is not finite."""
    layout, training, cpu = run.layout, job.training, torch.device("cpu")
    sharded = build_sharded_model(job, config, device=cpu, world_size=layout.world_size)
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters(), sharded.meshes.group)
    step_fn = TrainStep(sharded, optimizer, training, device=cpu)
    if run.alter is not None:
        run.alter(sharded, step_fn)
    loader = build_loader(
        training,
        load_tokenizer(job.model.tokenizer_path),
        seed=job.debug.seed,
        rank=sharded.meshes.dims.coordinate(dist.get_rank(), "batch"),
        num_ranks=layout.data_ranks,
        global_batch_size=training.global_batch_size,
        permutation=job.debug.permute_rows,
        validation=job.validation,
    )
    results = []
    for step in range(1, training.steps + 1):
        set_lr(optimizer, lr_factor(step, job.lr_scheduler, training.steps))
        results.append(step_fn(loader.next_step(), parameter_norms=parameter_norms))
        if not results[-1].finite:
            break
    loader.close()
    return [name.removesuffix(".block") for name in sharded.all_moe_layers()], results


def _curve(name: str, num_steps: int, layers: Sequence[str], results: list[StepResult]) -> Curve:
    """NaN after the last result."""
    rows = [_measured(layers, result) for result in results]
    found = {
        key: np.full((num_steps, *np.shape(value)), np.nan, dtype=np.float64)
        for key, value in rows[0].items()
    }
    for step, row in enumerate(rows):
        for key, value in row.items():
            found[key][step] = value
    loads = {layer: found.pop(LOAD_OF + layer) for layer in layers}
    data = [int(each.metrics["data"]) for each in results if each.metrics is not None]
    whole = data if len(data) == num_steps else None
    return Curve(name, range(1, num_steps + 1), found, loads, whole)


def _measured(layers: Sequence[str], result: StepResult) -> dict[str, Any]:
    """A step's scalars and loads, under the names that a Curve has for them."""
    found: dict[str, Any] = {"loss": result.loss, "grad_norm": result.grad_norm}
    for name, norms in (result.parameter_norms or {}).items():
        found |= norm_scalars(name, norms)
    if result.counts_LE is not None:
        for layer, counts_E in zip(layers, result.counts_LE.tolist(), strict=True):
            found[LOAD_OF + layer] = counts_E
    return found


def norm_scalars(name: str, norms: Sequence[float]) -> dict[str, float]:
    """A parameter's norms by their names in a Curve."""
    if len(norms) == 1:
        return {NORM_OF + name: norms[0]}
    return {f"{NORM_OF}{name}[{expert}]": norm for expert, norm in enumerate(norms)}
