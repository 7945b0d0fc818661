"""From a resolved config to a sharded model: the only file that knows both models and
distributed."""

from dataclasses import dataclass, replace

import torch

from titan_moe.config.job import JobConfig
from titan_moe.config.sections import Parallelism, Training
from titan_moe.distributed.activation_checkpoint import apply_activation_checkpoint
from titan_moe.distributed.expert_parallel import apply_expert_parallel
from titan_moe.distributed.fsdp import ShardingPolicy, apply_fsdp
from titan_moe.distributed.initial_weights import fill_initial_weights
from titan_moe.distributed.meshes import Meshes, build_meshes
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder, initial_std, move_off_meta
from titan_moe.models.layers.attention_core import choose_core
from titan_moe.models.registry import build_model


@dataclass(frozen=True)
class ShardedModel:
    """A model laid out over the ranks, ready to train."""

    model: Decoder
    config: ModelConfig
    meshes: Meshes


def parallel_dims(parallelism: Parallelism, world_size: int) -> ParallelDims:
    """The mesh axes of a config."""
    return ParallelDims(
        world_size=world_size,
        pp=parallelism.pipeline_parallel_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
    )


def resolve_model(config: ModelConfig, job: JobConfig) -> ModelConfig:
    """The flavor's dimensions with the [moe] and [debug] tables' words on them."""
    if config.moe is None:
        return config
    named = job.moe.model_dump(exclude_none=True)
    forced = job.debug.moe_force_load_balance
    return replace(config, moe=replace(config.moe, **named, force_load_balance=forced))


def build_sharded_model(
    job: JobConfig, config: ModelConfig, *, device: torch.device, world_size: int
) -> ShardedModel:
    """Lay a model out over an initialised world; collective over all ranks."""
    # 1. The two views of the world.
    meshes = build_meshes(parallel_dims(job.parallelism, world_size), device.type)

    # 2. The plain model, without memory.
    config = resolve_model(config, job)
    core = choose_core(mask_documents=job.training.mask_documents, device_type=device.type)
    with torch.device("meta"):
        model = build_model(job.model.name, config, core)
    for parameter in model.parameters():  # Buffers keep their own types: a bias of 1e-3 steps.
        parameter.data = parameter.data.to(_dtype(job.training.dtype))

    # 3. Experts to their ranks, before anything else looks at parameters.
    apply_expert_parallel(list(model.moe_layers().values()), meshes)

    # 4. Recomputation inside FSDP's hooks, so that a recomputed block finds its gathered
    # parameters.
    apply_activation_checkpoint(dict(model.layers.items()), job.activation_checkpoint)

    # 5. Data parallelism over all of it.
    units = [model.tok_embeddings, *model.layers.values(), model.output]
    apply_fsdp(model, units, meshes, _sharding_policy(job.training, job.parallelism))

    # 6. Memory and first values, the same bits in every layout.
    offloaded = torch.device("cpu") if job.training.enable_cpu_offload else device
    move_off_meta(model, device, parameter_device=offloaded)
    fill_initial_weights(model, job.debug.seed, lambda name: initial_std(name, config))
    return ShardedModel(model, config, meshes)


def _sharding_policy(training: Training, parallelism: Parallelism) -> ShardingPolicy:
    everything_wide = training.dtype == "float64"
    reshard = parallelism.fsdp_reshard_after_forward
    return ShardingPolicy(
        compute_dtype=_dtype("float64" if everything_wide else training.mixed_precision_param),
        reduce_dtype=_dtype("float64" if everything_wide else training.mixed_precision_reduce),
        reshard_after_forward=reshard != "never",
        reshard_last=reshard == "always",
        cpu_offload=training.enable_cpu_offload,
    )


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
