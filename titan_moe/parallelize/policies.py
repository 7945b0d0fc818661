"""Makes the plan of a job's layout: resolves every "auto", default and combination of keys, once.

Imports no torch, and exchanges nothing: a plan for any world takes milliseconds.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from titan_moe.config import pipeline
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.distributed.parallel_dims import ParallelDims, parallel_dims
from titan_moe.models.config import MLAConfig, ModelConfig
from titan_moe.models.stats import part_flops
from titan_moe.moe.config import (
    DispatchOptions,
    MoEConfig,
    deduplication_pays,
    places_reached,
    rows_of_buffers,
)
from titan_moe.parallelize.memory import MARGIN, memory
from titan_moe.parallelize.plan import Plan, types_of

# Each expert's rows are padded to multiples of these, in bfloat16. CUDA's kernels read 16 bytes at
# a time. oneDNN generates code for each new number of rows and keeps it: without padding a run on a
# CPU grew by 1 GB in 20 steps, and a step of 8 experts took a fifth longer.
_ROWS_OF_EXPERTS = {"cuda": 8, "cpu": 128}


def make_plan(
    job: JobConfig,
    config: ModelConfig,
    world_size: int,
    *,
    device_type: str = "cpu",
    device_bytes: float | None = None,
    ranks_per_node: int | None = None,
) -> Plan:
    """Returns the plan of a job, or of one of its training stages.

    Args:
        config: dimensions of `model_of_job`.
        device_bytes: a GPU's memory; None: a CPU, or not known.
        ranks_per_node: the launcher's number, which the job may override; None: all on one node.

    Raises ValueError for degrees that do not fit the world, and ConfigError for a pipeline that the
    model cannot be cut into.
    """
    training, parallelism, device = job.training, job.parallelism, device_type
    dims = parallel_dims(parallelism, world_size)
    config = resolve_model(config, job, device)
    stages = _stages(job, config)
    dispatch, reason = _dispatch(parallelism, config.moe, dims, ranks_per_node)
    sequences = dims.size("batch") * training.local_batch_size
    frees = parallelism.fsdp_reshard_after_forward
    if dims.pp > 1 and (frees == "default" or pipeline.schedule_of(parallelism).splits_backward):
        # A pipeline would gather the parameters anew for every microbatch. A split backward looks
        # parameters up in the module: while sharded ones stand there, torch 2.13 finds no path to
        # them and leaves their gradients out, silently.
        frees = "never"
    plan = Plan(
        job=job,
        config=config,
        dims=dims,
        device_type=device,
        types=types_of(training),
        stages=stages,
        stages_of_ranks=_stages_of_ranks(parallelism, len(stages)),
        dispatch=dispatch,
        dispatch_reason=reason,
        exchange_rows=_exchange_rows(job, config.moe, dims) if dispatch.name == "symmetric" else 0,
        microbatches=1 if dims.pp > 1 else max(training.global_batch_size // sequences, 1),
        accumulation="reduce_each",
        reshard_after_forward=frees != "never",
        reshard_last=frees == "always",
        cpu_offload=training.enable_cpu_offload and device == "cuda",
        head_tail=dims.cp > 1 and parallelism.context_parallel_load_balancer == "headtail",
        pipelined_tp=parallelism.enable_async_tensor_parallel and device == "cuda" and dims.tp > 1,
        stops_on_overflow=parallelism.expert_parallel_overflow == "stop",
        counts_in_documents=training.mask_documents and config.has_temperature,
        counts_answers=training.dataset_format == "messages",
    )
    return _accumulating(plan, device_bytes)


def _accumulating(plan: Plan, device_bytes: float | None) -> Plan:
    """Returns the plan with what the microbatches of a step share; "auto" takes the most that
    fits."""
    keeping = {
        "keep_gathered": replace(
            plan, accumulation="keep_gathered", reshard_after_forward=False, reshard_last=False
        ),
        "keep_unsharded": replace(plan, accumulation="keep_unsharded"),
        "reduce_each": plan,
    }
    if (wanted := plan.job.parallelism.fsdp_accumulation) != "auto":
        return keeping[wanted]
    if plan.microbatches == 1 or device_bytes is None:
        return plan
    if not any(plan.unsharded):
        del keeping["keep_unsharded"]
    fits = (each for each in keeping.values() if memory(each).needed + MARGIN <= device_bytes)
    return next(fits, plan)


def resolve_model(config: ModelConfig, job: JobConfig, device_type: str) -> ModelConfig:
    """Returns the dimensions of `model_of_job` with the keys of [moe], [training] and [debug] on
    top. A `moe.row_alignment` that is left out takes the default of the type of device."""
    if job.training.mtp_loss_weight is not None:
        config = replace(config, mtp_loss_weight=job.training.mtp_loss_weight)
    attention = config.attention
    if isinstance(attention, MLAConfig) and attention.indexer is not None:
        indexer = replace(attention.indexer, warm_up=job.training.indexer_stage == "dense")
        config = replace(config, attention=replace(attention, indexer=indexer))
    if config.moe is None:
        return config
    named = job.moe.model_dump(exclude_none=True)
    if types_of(job.training).compute == "bfloat16":
        named = {"row_alignment": _ROWS_OF_EXPERTS[device_type]} | named
    if job.model.converters:
        from titan_moe.models.quantize import row_alignment  # With torch, whose kernels ask for it.

        rows = row_alignment(job.model.converters, job.quantize)
        named["row_alignment"] = max(named.get("row_alignment", 1), rows)
    named["force_load_balance"] = job.debug.moe_force_load_balance
    return _with_moe(config, tuple(named.items()))


@lru_cache(maxsize=64)
def _with_moe(config: ModelConfig, keys: tuple[tuple[str, Any], ...]) -> ModelConfig:
    """Returns the dimensions with other keys of `moe`; the same object for the same keys, whose
    sums over layers are then made once for thousands of plans."""
    assert config.moe is not None
    return replace(config, moe=replace(config.moe, **dict(keys)))


def _stages(job: JobConfig, config: ModelConfig) -> list[list[str]]:
    parallelism, num_layers = job.parallelism, config.num_layers
    if parallelism.pipeline_parallel_degree == 1:
        return [pipeline.module_names(num_layers)]
    size = job.training.local_batch_size
    if wrong := pipeline.problems(parallelism, num_layers=num_layers, local_batch_size=size):
        raise ConfigError([str(each) for each in wrong])
    return pipeline.model_parts(parallelism, part_flops(config, job.training.seq_len), num_layers)


def _stages_of_ranks(parallelism: Parallelism, num_stages: int) -> list[list[int]]:
    schedule, ranks = pipeline.schedule_of(parallelism), parallelism.pipeline_parallel_degree
    if ranks == 1:
        return [[0]]
    return [pipeline.stages_of_rank(schedule, rank, ranks, num_stages) for rank in range(ranks)]


def _dispatch(
    parallelism: Parallelism, moe: MoEConfig | None, dims: ParallelDims, ranks_per_node: int | None
) -> tuple[DispatchOptions, str]:
    """Returns the dispatcher of a model's MoE layers with its options, and the reason for it if the
    job leaves it open."""
    name: str = parallelism.expert_parallel_comm_backend
    reason = ""
    factor = parallelism.expert_parallel_capacity_factor
    on_node = parallelism.expert_parallel_ranks_per_node or ranks_per_node or dims.world_size
    if factor is not None and name != "symmetric":
        name = "capacity"
    elif (dims.ep == 1 or moe is None) and name in ("auto", "balanced", "symmetric"):
        name = "standard"  # Nothing travels over an ep group of one.
    elif name == "auto" and moe is not None:
        name, reason = _choose_dispatcher(moe, dims, on_node)
    chunks = 2 if parallelism.expert_parallel_overlap else 1
    return DispatchOptions(name, factor, on_node, chunks), reason


def _choose_dispatcher(moe: MoEConfig, dims: ParallelDims, ranks_per_node: int) -> tuple[str, str]:
    """Returns "deduplicated" if that dispatcher sends clearly fewer rows, from 8 ranks on, else
    "standard"; and the reason.

    If ep spans nodes, rows between nodes are counted, which are the dearest.
    """
    ep, top_k = dims.ep, moe.top_k
    on_node = dims.ranks_on_node(ranks_per_node)
    places, word = (ep, "ranks") if on_node is None else (ep // on_node, "nodes")
    reached = places_reached(top_k, places)
    name = "deduplicated" if deduplication_pays(top_k, places, ep) else "standard"
    return name, (
        f"a token's {top_k} experts are on {reached:.2f} of {places} {word} on average, "
        f"{top_k / reached:.2f} rows for one"
    )


def _exchange_rows(job: JobConfig, moe: MoEConfig | None, dims: ParallelDims) -> int:
    """Returns the rows of a rank's largest microbatch, in training and in validation, that a buffer
    in symmetric memory has room for."""
    if moe is None:
        return 0
    training, validation, parallelism = job.training, job.validation, job.parallelism
    piped, size = dims.pp > 1, parallelism.pipeline_parallel_microbatch_size
    most = (size if piped else training.local_batch_size) * training.seq_len
    if validation.enable:
        seq_len = validation.seq_len or training.seq_len
        most = max(most, (size if piped else validation.local_batch_size) * seq_len)
    tokens, factor = most // (dims.cp * dims.tp), parallelism.expert_parallel_capacity_factor
    received = rows_of_buffers(tokens, moe.top_k, moe.num_experts, dims.ep, factor)
    return max(received, tokens * moe.top_k)
