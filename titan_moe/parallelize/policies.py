"""Derives from a job's tables the model's config on a device, and the options of FSDP and of the
dispatchers."""

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from titan_moe.comm import symmetric_memory
from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.distributed.expert_parallel import DispatchOptions, choose_dispatcher, most_tokens
from titan_moe.distributed.fsdp import ShardingPolicy
from titan_moe.distributed.parallel_dims import Meshes
from titan_moe.models.config import MLAConfig, ModelConfig
from titan_moe.models.quantize import row_alignment
from titan_moe.moe.config import rows_of_buffers
from titan_moe.moe.dispatch.symmetric import SymmetricDispatcher
from titan_moe.moe.layer import MoE
from titan_moe.moe.router import Router
from titan_moe.runtime.log import logger

_ROWS_OF_ONEDNN = 128
_ROWS_OF_16_BYTES = 8


def resolve_model(
    config: ModelConfig, job: JobConfig, device_type: str | None = None
) -> ModelConfig:
    """Returns the dimensions of `model_of_job` with the keys of [moe], [training] and [debug] on
    top. Keys that are left out take the default of the device type, if one is given."""
    if job.training.mtp_loss_weight is not None:
        config = replace(config, mtp_loss_weight=job.training.mtp_loss_weight)
    attention = config.attention
    if isinstance(attention, MLAConfig) and attention.indexer is not None:
        indexer = replace(attention.indexer, warm_up=job.training.indexer_stage == "dense")
        config = replace(config, attention=replace(attention, indexer=indexer))
    if config.moe is None:
        return config
    named = job.moe.model_dump(exclude_none=True)
    if device_type == "cpu" and compute_dtype(job) == torch.bfloat16:
        # oneDNN generates code for each new number of rows and keeps it: without padding a run
        # grew by 1 GB in 20 steps, and a step of 8 experts took a fifth longer.
        named = {"row_alignment": _ROWS_OF_ONEDNN} | named
    elif device_type == "cuda" and compute_dtype(job) == torch.bfloat16:
        named = {"row_alignment": _ROWS_OF_16_BYTES} | named
    if (rows := row_alignment(job.model.converters, job.quantize)) > 1:
        named["row_alignment"] = max(named.get("row_alignment", 1), rows)
    named["force_load_balance"] = job.debug.moe_force_load_balance
    return replace(config, moe=replace(config.moe, **named))


def dispatch_options(
    parallelism: Parallelism, config: ModelConfig, meshes: Meshes, ranks_per_node: int | None
) -> DispatchOptions:
    """Returns the dispatcher of a model's MoE layers and its options. `ranks_per_node`: the
    launcher's number, which the job may override; None: all ranks are on one node."""
    backend, dims = parallelism.expert_parallel_comm_backend, meshes.dims
    factor = parallelism.expert_parallel_capacity_factor
    on_node = parallelism.expert_parallel_ranks_per_node or ranks_per_node or dims.world_size
    name: str = "capacity" if factor is not None and backend != "symmetric" else backend
    if dims.ep == 1 and name in ("auto", "symmetric"):
        name = "standard"  # Nothing travels over an ep group of one.
    elif name == "auto" and config.moe is not None:
        name, reason = choose_dispatcher(config.moe, dims, on_node)
        logger.info("expert_parallel_comm_backend=auto is %s: %s", name, reason)
    return DispatchOptions(name, factor, on_node, 2 if parallelism.expert_parallel_overlap else 1)


def open_symmetric_memory(
    parts: Iterable[nn.Module],
    job: JobConfig,
    config: ModelConfig,
    meshes: Meshes,
    device: torch.device,
) -> None:
    """Gives symmetric dispatchers, if the layers have them, the buffers that they share, for the
    job's largest microbatch. Collective over the world, also on ranks without such a layer.

    Raises ConfigError where torch or the machine lacks symmetric memory.
    """
    ep, moe = meshes.dims.ep, config.moe
    factor = job.parallelism.expert_parallel_capacity_factor
    if moe is None or ep == 1 or job.parallelism.expert_parallel_comm_backend != "symmetric":
        return
    symmetric_memory.check_available(device)
    tokens = most_tokens(job.training, job.validation, job.parallelism)
    received = rows_of_buffers(tokens, moe.top_k, moe.num_experts, ep, factor)
    num_rows = max(received, tokens * moe.top_k)
    channels = symmetric_memory.open_channels(
        meshes.group("ep"), num_rows, config.dim, compute_dtype(job), device
    )
    for module in (each for part in parts for each in part.modules()):
        if isinstance(module, MoE):
            assert isinstance(module.dispatcher, SymmetricDispatcher)
            module.dispatcher.channels = channels


def sharding_policy(job: JobConfig, accumulation: str, device: torch.device) -> ShardingPolicy:
    """Returns FSDP's options. `accumulation`: `Accumulation.word`."""
    training, reshard = job.training, job.parallelism.fsdp_reshard_after_forward
    wide = training.dtype == "float64"
    # A pipeline would gather the parameters anew for every microbatch.
    freed_by_default = job.parallelism.pipeline_parallel_degree == 1
    keeps = accumulation == "keep_gathered"
    frees = reshard == "always" or (reshard == "default" and freed_by_default)
    return ShardingPolicy(
        stored_dtype=stored_dtype(job),
        compute_dtype=compute_dtype(job),
        reduce_dtype=getattr(torch, "float64" if wide else training.mixed_precision_reduce),
        reshard_after_forward=frees and not keeps,
        reshard_last=reshard == "always" and not keeps,
        cpu_offload=training.enable_cpu_offload and device.type == "cuda",
    )


def compute_dtype(job: JobConfig) -> torch.dtype:
    """Returns the type of products and activations."""
    stored = job.training.dtype
    return getattr(torch, stored if stored == "float64" else job.training.mixed_precision_param)


def stored_dtype(job: JobConfig) -> torch.dtype:
    """Returns the type of the parameters that the optimizer updates."""
    return getattr(torch, job.training.dtype)


def warn_of_unbalanced_experts(config: ModelConfig, parts: Iterable[nn.Module]) -> None:
    """Warn, once, where no rule and no loss keeps the load even of routers that train, on these
    parts of the model. A weight in a config.json is not read: transformers' loss is over all layers
    at once."""
    routers = [each for part in parts for each in part.modules() if isinstance(each, Router)]
    learn = any(router.gate.weight.requires_grad for router in routers)
    unbalanced = config.moe is not None and not config.moe.is_balanced
    if unbalanced and learn and dist.get_rank() == 0:
        logger.warning(
            "nothing balances the experts: moe.bias_update_speed and the weights of both balance "
            "losses are 0; set one of them, such as moe.global_aux_loss_weight"
        )
