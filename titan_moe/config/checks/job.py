"""Rules across tables: what no single key can know. One file for each subject.

Nothing here raises, so that everything wrong is reported at once. A rule that needs the degrees to
fit the number of ranks is silent where they do not: `parallelism` says so.
"""

from dataclasses import replace

from titan_moe.config.checks import (
    checkpoint,
    data,
    debug,
    experts,
    parallelism,
    precision,
    stages,
    training,
)
from titan_moe.config.checks.run import Check, ModelShape, Note, Run
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import resolve
from titan_moe.config.stages import TRAINING_KEYS, stage_jobs, stage_name

_CHANGING = (
    "parallelism.",
    "activation_checkpoint.",
    *(f"training.{key}" for key in TRAINING_KEYS),
)
"""Keys, or how keys begin, of what may change while a run trains."""


def check(job: JobConfig, model: ModelShape, world_size: int, *, num_gpus: int) -> list[str]:
    """One line for every broken rule, by the job and by each of its training stages. `num_gpus`:
    GPUs of this machine; 0 means a CPU run."""
    lines = _lines(job, model, world_size, num_gpus=num_gpus)
    return [line for line in lines if not isinstance(line, Note)]


def notes(job: JobConfig, model: ModelShape, world_size: int, *, num_gpus: int) -> list[str]:
    """One line for every key that has no effect in this run, though it may in another."""
    lines = _lines(job, model, world_size, num_gpus=num_gpus)
    return [line for line in lines if isinstance(line, Note)]


def _lines(job: JobConfig, model: ModelShape, world_size: int, *, num_gpus: int) -> list[str]:
    run = Run(job, model, world_size, num_gpus)
    lines = [line for rule in _CHECKS for line in rule(run)]
    said = set(lines)
    whole = job if run.shard is None else resolve(job, world_size)
    for number, (_, stage) in enumerate(stage_jobs(whole)[1:]):
        broken = [line for rule in _CHECKS for line in rule(replace(run, job=stage))]
        name = stage_name(job, number)
        # Keeps what is a Note one.
        lines += [type(line)(f"{name}: {line}") for line in broken if line not in said]
        said |= set(broken)
    return lines


def check_reshard(
    before: JobConfig, job: JobConfig, model: ModelShape, world_size: int, *, num_gpus: int
) -> list[str]:
    """As `check`, of what a run of `before`, resolved, is to go on as without a restart: also one
    line for every key that cannot change so."""
    if lines := check(job, model, world_size, num_gpus=num_gpus):
        return lines
    old, new = (
        {
            f"{table}.{key}": value
            for table, keys in each.model_dump(exclude={"stages"}).items()
            for key, value in keys.items()
        }
        for each in (before, resolve(job, world_size))
    )
    return [
        f"{key}={new[key]}, and the run has {value}: set it to that"
        for key, value in old.items()
        if new[key] != value and not key.startswith(_CHANGING)
    ]


def _unlimited_or_positive(run: Run) -> list[str]:
    values = {
        "parallelism.data_parallel_shard_degree": run.job.parallelism.data_parallel_shard_degree,
        "training.global_batch_size": run.job.training.global_batch_size,
        "validation.steps": run.job.validation.steps,
    }
    return [
        f"{key}={value} must be -1 or at least 1"
        for key, value in values.items()
        if value < 1 and value != -1
    ]


_CHECKS: list[Check] = [
    _unlimited_or_positive,
    *parallelism.CHECKS,
    *experts.CHECKS,
    *data.CHECKS,
    *precision.CHECKS,
    *training.CHECKS,
    *stages.CHECKS,
    *checkpoint.CHECKS,
    *debug.CHECKS,
]
