"""Mesh axes of the dense layers, the pipeline, and training stages."""

import math
from collections.abc import Iterator
from importlib.metadata import version

from titan_moe.checks.base import Rule, Run, choices, divisors, must_divide
from titan_moe.config import pipeline
from titan_moe.config.errors import Mistake
from titan_moe.models.config import CompressedConfig, ModelConfig

TORCH = version("torch")


def _ranks(run: Run) -> Iterator[Mistake]:
    if run.shard is not None:
        return
    degrees = run.job.parallelism.degrees
    sizes = {axis: abs(size) for axis, size in degrees.items() if axis not in ("ep", "etp")}
    product = math.prod(sizes.values())
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "dp_shard 1"
    if degrees["dp_shard"] == -1:
        yield Mistake(
            f"parallelism: {shown} = {product} must divide the {run.world_size} ranks of this run",
            [[{"ranks": n * product} for n in range(1, 9)]],
            "choose other degrees",
        )
    else:
        yield Mistake(
            f"parallelism: {shown} = {product} ranks, but this run has {run.world_size}",
            [[{"ranks": product}], [{"parallelism.data_parallel_shard_degree": -1}]],
            "choose other degrees",
        )


def _tensor(run: Run) -> Iterator[Mistake]:
    degree, model = run.job.parallelism.tensor_parallel_degree, run.model
    sizes = _heads(model) | {"vocab_size": model.vocab_size}
    if model.recurrent is not None:
        sizes["the recurrent layers' key heads"] = model.recurrent.num_key_heads
    if model.has_dense:
        sizes["hidden_dim"] = model.hidden_dim
    if model.moe is not None and model.moe.num_shared_experts:
        shared = model.moe.num_shared_experts * model.moe.hidden_dim
        sizes["the shared experts' hidden_dim"] = shared
    key = "parallelism.tensor_parallel_degree"
    yield from must_divide(key, degree, sizes, of=f" of {run.flavor}")


def _heads(model: ModelConfig) -> dict[str, int]:
    """Returns the numbers of heads of all layers' attention: what divides them divides each."""
    kinds = model.attentions
    return {
        "num_heads": math.gcd(*(each.num_heads for each in kinds)),
        "num_kv_heads": math.gcd(*(each.num_kv_heads for each in kinds)),
    }


def _symmetric_memory(run: Run) -> Iterator[str]:
    degrees = run.job.parallelism
    users = {
        "enable_async_tensor_parallel=true": run.pipelines_tp,
        "expert_parallel_comm_backend=symmetric": degrees.expert_parallel_degree > 1
        and degrees.expert_parallel_comm_backend == "symmetric",
    }
    named = [setting for setting, uses in users.items() if uses]
    if len(named) > 1:
        yield f"parallelism.{' and '.join(named)} need buffers of symmetric memory: choose one"
    if named and run.job.comm.share_gpus:
        yield (
            f"parallelism.{named[0]} wants symmetric memory, which ranks of one GPU do not have: "
            "choose another value, or comm.share_gpus=false"
        )


def _sequence_slices(run: Run) -> Iterator[Mistake]:
    degrees = run.job.parallelism
    cp, tp = degrees.context_parallel_degree, degrees.tensor_parallel_degree
    balanced = cp > 1 and degrees.context_parallel_load_balancer == "headtail"
    step, limit = math.lcm(2 * cp if balanced else cp, cp * tp), run.model.max_seq_len
    for key, length in run.sequence_lengths.items():
        if length % step:
            below = length // step * step
            legal = [n for n in (below, below + step) if step <= n <= limit]
            headtail = ", context_parallel_load_balancer=headtail" * balanced
            yield Mistake(
                f"{key}={length} must be a multiple of {step}, for context_parallel_degree={cp}"
                f"{headtail} and tensor_parallel_degree={tp}",
                choices(key, legal),
                "choose smaller degrees",
            )


def _recurrent_segments(run: Run) -> Iterator[str]:
    degrees, recurrent = run.job.parallelism, run.model.recurrent
    cp = degrees.context_parallel_degree
    segments = cp * (2 if degrees.context_parallel_load_balancer == "headtail" else 1)
    if recurrent is None or cp == 1:
        return
    back = recurrent.conv_size - 1
    for key, length in run.sequence_lengths.items():
        if length // segments < back:
            yield (
                f"{key}={length} in {segments} segments for context_parallel_degree={cp} leaves "
                f"less than the {back} tokens that the convolutions of {run.flavor} look back: "
                f"choose {segments * back} or more, or a smaller degree"
            )


def _ulysses(run: Run) -> Iterator[Mistake]:
    degrees, of_heads = run.job.parallelism, _heads(run.model)
    cp, tp = degrees.context_parallel_degree, degrees.tensor_parallel_degree
    heads = math.gcd(*of_heads.values())
    if degrees.context_parallel_rotate_method != "ulysses" or heads % tp or heads // tp % cp == 0:
        return
    yield Mistake(
        f"parallelism.context_parallel_degree={cp} with context_parallel_rotate_method=ulysses "
        f"must divide {' and '.join(f'{key}={n} / tp {tp}' for key, n in of_heads.items())}",
        [
            *divisors("parallelism.context_parallel_degree", heads // tp),
            [{"parallelism.context_parallel_rotate_method": "allgather"}],
        ],
        "choose context_parallel_rotate_method=allgather or ring",
    )


def _sparse(run: Run) -> Iterator[str | Mistake]:
    degrees, method = run.job.parallelism, run.job.parallelism.context_parallel_rotate_method
    if (cp := degrees.context_parallel_degree) == 1:
        return
    if run.model.indexer is not None and method != "allgather":
        yield (
            f"parallelism.context_parallel_rotate_method={method}: an indexer of {run.flavor} "
            "selects among the keys of whole sequences: choose allgather"
        )
    if isinstance(run.model.attention, CompressedConfig):
        key = "parallelism.context_parallel_degree"
        line = f"{key}={cp}: {run.flavor} compresses blocks of whole sequences"
        yield Mistake(line, choices(key, [1]), "set it to 1")


def _shared_keys(run: Run) -> Iterator[str]:
    """Yields a line unless each stage of a pipeline begins with a layer that selects keys."""
    degrees, indexer = run.job.parallelism, run.model.indexer
    if indexer is None or not indexer.shared_in or degrees.pipeline_parallel_degree == 1:
        return
    parts = degrees.module_fqns_per_model_part
    firsts = [next((n for n in part if n.startswith("layers.")), "") for part in parts or []]
    if parts is None or {f"layers.{layer}" for layer in indexer.shared_in} & {*firsts}:
        yield (
            f"parallelism.pipeline_parallel_degree={degrees.pipeline_parallel_degree}: layers of "
            f"{run.flavor} see the keys that one before them selects: list stages in "
            "module_fqns_per_model_part, each of which begins with a layer that has an indexer"
        )


def _pipeline(run: Run) -> Iterator[str | Mistake]:
    degrees, rows = run.job.parallelism, run.job.training.local_batch_size
    yield from pipeline.problems(degrees, num_layers=run.model.num_layers, local_batch_size=rows)
    schedule, mode = pipeline.schedule_of(degrees), run.job.activation_checkpoint.mode
    if degrees.pipeline_parallel_degree == 1 or not schedule.splits_backward:
        return
    name = f"pipeline_parallel_schedule={schedule.name}"
    whole = ", ".join(n for n, known in pipeline.SCHEDULES.items() if not known.splits_backward)
    whole = f"one of {whole}"
    if tuple(map(int, TORCH.split(".")[:2])) < (2, 13):
        yield (
            f"parallelism.{name} splits the backward, and torch {TORCH} cannot split "
            f"that of these models: choose {whole}, or install torch 2.13 or newer"
        )
    if mode != "none":
        yield (
            f"activation_checkpoint.mode={mode} with {name}, which splits the backward, would "
            f"recompute layers several times: choose activation_checkpoint.mode=none, or {whole}"
        )
    if run.job.compile.compiles_layers:
        yield (
            f"parallelism.{name} splits the backward, which compile.enable=true makes one graph "
            f"of: choose {whole}, or compile.components=['loss']"
        )


def _split_groups(run: Run) -> Iterator[str]:
    """Yields a line for a pipeline whose ranks would split other groups off, as its stages do."""
    if run.job.comm.split_communicators and run.job.parallelism.pipeline_parallel_degree > 1:
        yield (
            "comm.split_communicators=true: all ranks must ask for the same groups, and stages of "
            "a pipeline may not: choose false, or parallelism.pipeline_parallel_degree=1"
        )


def _thread_blocks(run: Run) -> Iterator[str]:
    """Yields a line for each group of parameters whose fewest blocks are more than its most."""
    comm = run.job.comm
    for axis in ("dp_replicate", "fsdp", "edp"):
        own, most = comm.axes.get(axis), comm.parameter_sms
        if own and most and own.min_ctas and not own.max_ctas and own.min_ctas > most:
            yield f"comm.axes: {axis}.min_ctas is above comm.parameter_sms: choose at most {most}"


def _order_of_stages(run: Run) -> Iterator[str]:
    stages = run.job.stages
    for number in range(1, len(stages)):
        step, before = stages[number].from_step, stages[number - 1].from_step
        if step <= before:
            yield (
                f"stages[{number}].from_step={step} must be more than stages[{number - 1}]."
                f"from_step={before}: name the stages in the order of their steps"
            )


RULES: list[Rule] = [
    _ranks,
    _tensor,
    _symmetric_memory,
    _shared_keys,
    _sequence_slices,
    _recurrent_segments,
    _ulysses,
    _sparse,
    _pipeline,
    _split_groups,
    _thread_blocks,
    _order_of_stages,
]
