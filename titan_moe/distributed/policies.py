"""What a job's tables say to FSDP: types, what is gathered and freed, what microbatches share."""

import torch

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.fsdp import ShardingPolicy
from titan_moe.models.config import ModelConfig
from titan_moe.runtime.device import memory_of
from titan_moe.simulate.memory import Accumulation, choose_accumulation


def sharding_policy(job: JobConfig, accumulation: str) -> ShardingPolicy:
    """`accumulation`: as `accumulation_of` has found it."""
    training, reshard = job.training, job.parallelism.fsdp_reshard_after_forward
    wide = training.dtype == "float64"
    # A pipeline would gather the parameters anew for every microbatch.
    freed_by_default = job.parallelism.pipeline_parallel_degree == 1
    keeps = accumulation == "keep_gathered"
    frees = reshard == "always" or (reshard == "default" and freed_by_default)
    return ShardingPolicy(
        stored_dtype=stored_dtype(job),
        compute_dtype=compute_dtype(job),
        reduce_dtype=_dtype("float64" if wide else training.mixed_precision_reduce),
        reshard_after_forward=frees and not keeps,
        reshard_last=reshard == "always" and not keeps,
        cpu_offload=training.enable_cpu_offload,
        accumulation=accumulation,
    )


def accumulation_of(
    job: JobConfig, config: ModelConfig, world_size: int, device: torch.device
) -> Accumulation:
    """What the microbatches of a step share on this device. ConfigError where offloaded gradients
    leave no choice."""
    sections = (job.training, job.parallelism, job.activation_checkpoint)
    try:
        return choose_accumulation(config, *sections, world_size, memory_of(device))
    except ValueError as error:
        raise ConfigError([str(error)]) from None


def compute_dtype(job: JobConfig) -> torch.dtype:
    """Of products and activations."""
    training = job.training
    return _dtype("float64" if training.dtype == "float64" else training.mixed_precision_param)


def stored_dtype(job: JobConfig) -> torch.dtype:
    """Of the parameters that the optimizer updates."""
    return _dtype(job.training.dtype)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
