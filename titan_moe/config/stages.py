"""The configuration of each training stage: what `[[stages]]` make of a job."""

from titan_moe.config.job_config import JobConfig, TrainingStage

_TRAINING_KEYS = ("seq_len", "local_batch_size", "global_batch_size")


def stage_jobs(job: JobConfig) -> list[tuple[int, JobConfig]]:
    """Each stage's first step and its whole configuration, which has no stages itself.

    The first is the job's own, from step 1; a later stage changes what the one before it had. The
    job's global_batch_size is to be resolved before: later stages keep it.
    """
    jobs = [(1, job.model_copy(update={"stages": []}))]
    for stage in job.stages:
        jobs.append((stage.from_step, _changed(jobs[-1][1], stage)))
    return jobs


def job_of_step(job: JobConfig, step: int) -> JobConfig:
    """The configuration of the stage that `step` belongs to."""
    return next(each for first, each in reversed(stage_jobs(job)) if first <= max(step, 1))


def stage_name(job: JobConfig, number: int) -> str:
    """How messages name the stage `job.stages[number]`."""
    return f"stages[{number}] (from_step={job.stages[number].from_step})"


def changes(before: JobConfig, after: JobConfig) -> str:
    """What one stage changes of another, such as "training.seq_len 4096 -> 32768"."""
    words = []
    for table in ("training", "parallelism"):
        old, new = getattr(before, table), getattr(after, table)
        words += [
            f"{table}.{key} {getattr(old, key)} -> {getattr(new, key)}"
            for key in type(old).model_fields
            if getattr(old, key) != getattr(new, key)
        ]
    return ", ".join(words)


def _changed(job: JobConfig, stage: TrainingStage) -> JobConfig:
    values = {key: getattr(stage, key) for key in _TRAINING_KEYS}
    training = {key: value for key, value in values.items() if value is not None}
    degrees = {key: getattr(stage.parallelism, key) for key in stage.parallelism.model_fields_set}
    return job.model_copy(
        update={
            "training": job.training.model_copy(update=training),
            "parallelism": job.parallelism.model_copy(update=degrees),
        }
    )
