"""Rules across tables: what no single key can know. One file for each subject.

Nothing here raises, so that everything wrong is reported at once. A rule that needs the degrees to
fit the number of ranks is silent where they do not: `parallelism` says so.
"""

from titan_moe.config.checks import (
    checkpoint,
    data,
    debug,
    experts,
    parallelism,
    precision,
    training,
)
from titan_moe.config.checks.run import Check, ModelShape, Run
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import resolve

_LAYOUT = ("parallelism.", "activation_checkpoint.", "training.local_batch_size")
"""Keys, or how keys begin, of what may change while a run trains."""


def check(job: JobConfig, model: ModelShape, world_size: int, *, num_gpus: int) -> list[str]:
    """One line for every broken rule. `num_gpus`: GPUs of this machine; 0 means a CPU run."""
    run = Run(job, model, world_size, num_gpus)
    return [line for rule in _CHECKS for line in rule(run)]


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
            for table, keys in each.model_dump().items()
            for key, value in keys.items()
        }
        for each in (before, resolve(job, world_size))
    )
    return [
        f"{key}={new[key]}, and the run has {value}: set it to that, the layout alone can change"
        for key, value in old.items()
        if new[key] != value and not key.startswith(_LAYOUT)
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
    *checkpoint.CHECKS,
    *debug.CHECKS,
]
