"""All rules across tables, on a job and each of its training stages.

Nothing here raises, so that everything wrong is reported at once. A rule that needs the degrees to
fit the number of ranks is silent where they do not: `parallelism` says so.
"""

from titan_moe.config.checks import data, experts, parallelism, run
from titan_moe.config.checks.base import Rule, Run, flat
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import resolve
from titan_moe.config.stages import TRAINING_KEYS, stage_jobs, stage_name
from titan_moe.models.config import ModelConfig

_RULES: list[Rule] = [*parallelism.RULES, *experts.RULES, *data.RULES, *run.RULES]
_CHANGING = (
    "parallelism.",
    "activation_checkpoint.",
    *(f"training.{key}" for key in TRAINING_KEYS),
)
"""Keys, or how keys begin, of what may change while a run trains."""


def check(job: JobConfig, model: ModelConfig, world_size: int) -> list[str]:
    """Returns one line for every broken rule, of the job and of each of its training stages."""
    lines = _broken(job, model, world_size)
    said = set(lines)
    whole = job if job.parallelism.shard_degree(world_size) is None else resolve(job, world_size)
    for number, (_, stage) in enumerate(stage_jobs(whole)[1:]):
        broken = [line for line in _broken(stage, model, world_size) if line not in said]
        lines += [f"{stage_name(job, number)}: {line}" for line in broken]
        said |= set(broken)
    return lines


def check_reshard(
    before: JobConfig, job: JobConfig, model: ModelConfig, world_size: int
) -> list[str]:
    """Checks the job that a run of `before`, resolved, is to continue as without a restart.

    Returns the lines of `check`; without any, one for each key that cannot change so.
    """
    if lines := check(job, model, world_size):
        return lines
    old, new = flat(before), flat(resolve(job, world_size))
    return [
        f"{key}={new[key]}, and the run has {value}: set it to that"
        for key, value in old.items()
        if new[key] != value and not key.startswith(_CHANGING)
    ]


def _broken(job: JobConfig, model: ModelConfig, world_size: int) -> list[str]:
    return [line for rule in _RULES for line in rule(Run(job, model, world_size))]
