"""Mesh axes of the dense layers, and the pipeline: degrees, lengths and sizes that fit."""

import math

from titan_moe.config import pipeline
from titan_moe.config.checks.run import Check, Note, Run, divisors, neighbours


def _ranks(run: Run) -> list[str]:
    if run.shard is not None:
        return []
    degrees = run.job.parallelism
    sizes = {
        "pp": degrees.pipeline_parallel_degree,
        "dp_replicate": degrees.data_parallel_replicate_degree,
        "dp_shard": degrees.data_parallel_shard_degree,
        "cp": degrees.context_parallel_degree,
        "tp": degrees.tensor_parallel_degree,
    }
    product = math.prod(abs(size) for size in sizes.values())
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "dp_shard 1"
    if sizes["dp_shard"] == -1:
        return [
            f"parallelism: {shown} = {product} must divide the {run.world_size} ranks of this run: "
            f"start it with a multiple, such as NGPU={product} (--ranks {product})"
        ]
    if sizes["dp_shard"] < 1:
        return []
    return [
        f"parallelism: {shown} = {product} ranks, but this run has {run.world_size}: start it with "
        f"NGPU={product} (--ranks {product}), or set parallelism.data_parallel_shard_degree=-1 to "
        "take what is there"
    ]


def _tensor(run: Run) -> list[str]:
    degree = run.job.parallelism.tensor_parallel_degree
    sizes = _tensor_sizes(run)
    broken = [f"{name}={size}" for name, size in sizes.items() if size % degree]
    if not broken:
        return []
    *others, last = broken
    shown = f"{', '.join(others)} and {last}" if others else last
    return [
        f"parallelism.tensor_parallel_degree={degree} must divide {shown} of {run.flavor}: choose "
        f"{divisors(math.gcd(*sizes.values()))}"
    ]


def _tensor_sizes(run: Run) -> dict[str, int]:
    """All that tensor parallelism cuts."""
    model = run.model
    sizes = {
        "num_heads": model.attention.num_heads,
        "num_kv_heads": model.attention.num_kv_heads,
        "vocab_size": model.vocab_size,
    }
    if not all(map(model.is_moe_layer, range(model.num_layers))):
        sizes["hidden_dim"] = model.hidden_dim
    if model.moe is not None and model.moe.num_shared_experts:
        sizes["the shared experts' hidden_dim"] = (
            model.moe.num_shared_experts * model.moe.hidden_dim
        )
    return sizes


def _async_tensor(run: Run) -> list[str]:
    job = run.job
    if not job.parallelism.enable_async_tensor_parallel:
        return []
    name = "parallelism.enable_async_tensor_parallel=true"
    if job.parallelism.tensor_parallel_degree == 1:
        return [Note(f"{name} has no effect without tensor_parallel_degree above 1")]
    if not job.compile.compiles_layers or job.compile.backend != "inductor":
        return [Note(f"{name} has no effect without compile.enable=true and backend=inductor")]
    if not run.num_gpus:
        return [Note(f"{name} has no effect on a CPU")]
    if job.parallelism.expert_parallel_comm_backend == "symmetric":
        return [
            f"{name} and expert_parallel_comm_backend=symmetric want symmetric memory of two kinds:"
            " choose one"
        ]
    return []


def _sequence_parts(run: Run) -> list[str]:
    degrees = run.job.parallelism
    cp, tp = degrees.context_parallel_degree, degrees.tensor_parallel_degree
    balanced = cp > 1 and degrees.context_parallel_load_balancer == "headtail"
    pieces = 2 * cp if balanced else cp
    step = math.lcm(pieces, cp * tp)
    causes = []
    if cp > 1:
        causes.append(f"context_parallel_degree={cp}" + (" cuts it in 2 x cp" if balanced else ""))
    if tp > 1:
        causes.append(f"tensor_parallel_degree={tp}")
    lengths = {
        "training.seq_len": run.job.training.seq_len,
        "validation.seq_len": run.job.validation.seq_len or 0,
    }
    lines = []
    for key, length in lengths.items():
        if length % step:
            limit = run.model.max_seq_len
            choices = neighbours(length, step, limit) if step <= limit else "smaller degrees"
            if length % (cp * tp) == 0:
                choices += ", or parallelism.context_parallel_load_balancer=none"
            lines.append(
                f"{key}={length} must be a multiple of {step}, since {' and '.join(causes)}: "
                f"choose {choices}"
            )
    return lines


def _ulysses(run: Run) -> list[str]:
    degrees, attention = run.job.parallelism, run.model.attention
    cp, tp = degrees.context_parallel_degree, degrees.tensor_parallel_degree
    heads = {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads}
    cut_by_tp = all(number % tp == 0 for number in heads.values())
    if degrees.context_parallel_rotate_method != "ulysses" or not cut_by_tp:
        return []
    broken = [
        f"{name} {number} / tp {tp} = {number // tp}"
        for name, number in heads.items()
        if number // tp % cp
    ]
    if not broken:
        return []
    legal = divisors(math.gcd(*heads.values()) // tp)
    return [
        f"parallelism.context_parallel_degree={cp} with context_parallel_rotate_method=ulysses "
        f"must divide {' and '.join(broken)}: choose {legal}, or "
        f"context_parallel_rotate_method=allgather or ring"
    ]


def _pipeline(run: Run) -> list[str]:
    degrees, training = run.job.parallelism, run.job.training
    return pipeline.problems(
        degrees, num_layers=run.model.num_layers, local_batch_size=training.local_batch_size
    )


def _pipeline_parts(run: Run) -> list[str]:
    degrees = run.job.parallelism
    others = {
        "layers_per_stage": degrees.pipeline_parallel_layers_per_stage,
        "first_stage_less_layers": degrees.pipeline_parallel_first_stage_less_layers,
        "last_stage_less_layers": degrees.pipeline_parallel_last_stage_less_layers,
    }
    if degrees.module_fqns_per_model_part is None:
        return []
    return [
        Note(
            f"parallelism.pipeline_parallel_{key}={value} has no effect beside "
            f"module_fqns_per_model_part"
        )
        for key, value in others.items()
        if value is not None
    ]


def _split_backward(run: Run) -> list[str]:
    degrees, mode = run.job.parallelism, run.job.activation_checkpoint.mode
    schedule = pipeline.schedule_of(degrees)
    if degrees.pipeline_parallel_degree == 1 or not schedule.splits_backward or mode == "none":
        return []
    whole = [name for name, known in pipeline.SCHEDULES.items() if not known.splits_backward]
    return [
        f"activation_checkpoint.mode={mode} with pipeline_parallel_schedule={schedule.name}, which "
        f"splits the backward, would recompute layers several times: choose "
        f"activation_checkpoint.mode=none, or one of {', '.join(whole)}"
    ]


def _accumulation(run: Run) -> list[str]:
    degrees = run.job.parallelism
    if degrees.pipeline_parallel_degree == 1 or degrees.fsdp_accumulation == "auto":
        return []
    return [
        Note(
            f"parallelism.fsdp_accumulation={degrees.fsdp_accumulation} has no effect on a "
            "pipeline, whose schedule gathers and reduces once a run"
        )
    ]


CHECKS: list[Check] = [
    _ranks,
    _tensor,
    _async_tensor,
    _sequence_parts,
    _ulysses,
    _pipeline,
    _pipeline_parts,
    _split_backward,
    _accumulation,
]
