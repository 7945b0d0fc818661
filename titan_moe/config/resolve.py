"""Values that follow from the number of ranks."""

from titan_moe.config.job_config import JobConfig
from titan_moe.config.layout import Parallelism


def shard_degree(parallelism: Parallelism, world_size: int) -> int | None:
    """Size of the dp_shard axis with -1 resolved to the rest; None when the degrees do not fit
    the ranks."""
    shard = parallelism.data_parallel_shard_degree
    others = (
        parallelism.pipeline_parallel_degree
        * parallelism.data_parallel_replicate_degree
        * parallelism.context_parallel_degree
        * parallelism.tensor_parallel_degree
    )
    if shard == -1:
        shard = world_size // others
    return shard if shard > 0 and shard * others == world_size else None


def resolve(job: JobConfig, world_size: int) -> JobConfig:
    """Pin global_batch_size, of which the data order is a function. `job` has passed
    `checks.check`."""
    if job.training.global_batch_size != -1:
        return job
    shard = shard_degree(job.parallelism, world_size)
    assert shard is not None
    data_ranks = job.parallelism.data_parallel_replicate_degree * shard
    rows = job.training.local_batch_size * data_ranks
    training = job.training.model_copy(update={"global_batch_size": rows})
    return job.model_copy(update={"training": training})
