"""The configuration of each training stage, which `[[stages]]` derive from a job."""

from itertools import pairwise

from titan_moe.config.job_config import JobConfig, TrainingStage

TRAINING_KEYS = ("seq_len", "local_batch_size", "global_batch_size")


def training_stages(job: JobConfig) -> list[tuple[int, JobConfig]]:
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
    return next(each for first, each in reversed(training_stages(job)) if first <= max(step, 1))


def training_stage_name(job: JobConfig, number: int) -> str:
    """Returns the name of the stage `job.stages[number]` in messages."""
    return f"stages[{number}] (from_step={job.stages[number].from_step})"


def changes(before: JobConfig, after: JobConfig) -> str:
    """Returns the keys that two stages differ in, such as "training.seq_len 4096 -> 32768"."""
    words = []
    for table in ("training", "parallelism"):
        old, new = getattr(before, table), getattr(after, table)
        words += [
            f"{table}.{key} {getattr(old, key)} -> {getattr(new, key)}"
            for key in type(old).model_fields
            if getattr(old, key) != getattr(new, key)
        ]
    return ", ".join(words)


def training_stage_lines(job: JobConfig) -> list[str]:
    """Returns one line for each stage after the first, with what it changes."""
    jobs = [each for _, each in training_stages(job)]
    return [
        f"{training_stage_name(job, number)}: {changes(before, after)}"
        for number, (before, after) in enumerate(pairwise(jobs))
    ]


def tokens_per_step(job: JobConfig) -> dict[int, int]:
    """Tokens of one optimizer step of each stage, by its first step."""
    return {
        step: stage.training.global_batch_size * stage.training.seq_len
        for step, stage in training_stages(job)
    }


def tokens_in_words(tokens: dict[int, int]) -> str:
    """Tokens of a step by the first step that has so many, such as "512, from step 9 on 1,024"."""
    words, last = [], None
    for step, size in tokens.items():
        if size != last:
            words.append(f"{size:,}" if last is None else f"from step {step} on {size:,}")
        last = size
    return ", ".join(words)


def _changed(job: JobConfig, stage: TrainingStage) -> JobConfig:
    training = stage.model_dump(include=set(TRAINING_KEYS), exclude_none=True)
    degrees = stage.parallelism.model_dump(exclude_unset=True, exclude_none=True)
    return job.with_values(training=training, parallelism=degrees)
