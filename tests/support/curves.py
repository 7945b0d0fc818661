"""Trains runs of a comparison in processes of this machine, many in the same ones."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titan_moe.config.checks.job import check
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job, resolve
from titan_moe.data.build import build_loader
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.distributed.parallelize import ShardedModel, build_sharded_model
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import model_of_job
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.optim.schedules import lr_factor, set_lr
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.train_step import StepResult, TrainStep
from titan_moe.verify.compare.control_runs import batch_words, control_specs, layout_of
from titan_moe.verify.compare.records import LOAD_OF, NORM_OF, Curve
from titan_moe.verify.compare.run_spec import RunSpec, Words

BFLOAT16 = (("training.mixed_precision_param", "bfloat16"),)
"""Forward and backward in bfloat16; parameters and reductions stay in float32."""

_TIMEOUT_S = 1800  # Ranks report nothing before their last step.


@dataclass(frozen=True)
class Training:
    """One run, ready to be trained."""

    name: str
    job: JobConfig
    world_size: int
    alter: Callable[[ShardedModel, TrainStep], None] | None = None
    """Plants a mistake. Called on every rank before the first step; a module's top-level
    function."""

    @property
    def config(self) -> ModelConfig:
        return model_of_job(self.job.model)


def training_of(spec: RunSpec, words: Words = (), **changes: Any) -> Training:
    """The training that a spec and further keys describe, as `verify losses` would start it."""
    more = dict((*batch_words(spec, spec.job()), *words))
    job = load_job([*spec.file(), *spec.arguments(*more.items())])
    name = f"{spec.text}, order {more.get('debug.permute_rows', 0)}".removeprefix(", ")
    return Training(name, resolve(job, spec.world_size), spec.world_size, **changes)


def control_trainings(spec: RunSpec, number: int) -> list[Training]:
    """The control runs that `verify losses --repeats NUMBER` trains on a machine without GPUs."""
    return [training_of(each, words) for each, words in control_specs(spec, number, num_gpus=0)]


def train(training: Training, *, parameter_norms: bool = False) -> Curve:
    """Train all steps of the job: loss, gradient norm and rows per expert of each, and every
    parameter's gradient norm if asked for. Raises ConfigError."""
    return train_each([training], parameter_norms=parameter_norms)[0]


def train_each(trainings: Sequence[Training], *, parameter_norms: bool) -> list[Curve]:
    """`train` for one after the other in the same processes, which costs less; they must have the
    same number of ranks."""
    (world_size,) = {each.world_size for each in trainings}
    for each in trainings:
        if lines := check(each.job, each.config, world_size):
            raise ConfigError([f"{each.name}: {line}" for line in lines])
    found = run_on_ranks(
        _train_on_rank, world_size, trainings, parameter_norms, timeout_s=_TIMEOUT_S
    )[0]
    return [
        _curve(each.name, each.job.training.steps, *measured)
        for each, measured in zip(trainings, found, strict=True)
    ]


def _train_on_rank(
    trainings: Sequence[Training], parameter_norms: bool
) -> list[tuple[list[str], list[StepResult]]]:
    warnings.simplefilter("ignore", FutureWarning)
    return [_train_one(each, parameter_norms) for each in trainings]


def _train_one(each: Training, parameter_norms: bool) -> tuple[list[str], list[StepResult]]:
    """The MoE layers' names, and what each step measured up to the first that is not finite."""
    job, training, cpu = each.job, each.job.training, torch.device("cpu")
    sharded = build_sharded_model(job, each.config, device=cpu, world_size=each.world_size)
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters(), sharded.meshes.group)
    step_fn = TrainStep(sharded, optimizer, training, device=cpu)
    if each.alter is not None:
        each.alter(sharded, step_fn)
    loader = build_loader(
        training,
        load_tokenizer(job.model.tokenizer_path),
        seed=job.debug.seed,
        rank=sharded.meshes.dims.coordinate(dist.get_rank(), "batch"),
        num_ranks=layout_of(job, each.world_size).data_ranks,
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
