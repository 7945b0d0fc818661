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
from titan_moe.config.checks.run import Check, ModelShape, Run
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import resolve
from titan_moe.config.stages import stage_jobs, stage_name


def check(job: JobConfig, model: ModelShape, world_size: int, *, num_gpus: int) -> list[str]:
    """One line for every broken rule, by the job and by each of its training stages. `num_gpus`:
    GPUs of this machine; 0 means a CPU run."""
    run = Run(job, model, world_size, num_gpus)
    lines = [line for rule in _CHECKS for line in rule(run)]
    said = set(lines)
    whole = job if run.shard is None else resolve(job, world_size)
    for number, (_, stage) in enumerate(stage_jobs(whole)[1:]):
        broken = [line for rule in _CHECKS for line in rule(replace(run, job=stage))]
        lines += [f"{stage_name(job, number)}: {line}" for line in broken if line not in said]
        said |= set(broken)
    return lines


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
