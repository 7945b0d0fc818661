"""Rules across tables: what no single key can know. One function each; all numbers are named.

Nothing here raises, so that everything wrong is reported at once. A rule that needs the degrees to
fit the number of ranks is silent where they do not: `_ranks` says so.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from titan_moe.config.job import JobConfig
from titan_moe.config.resolve import shard_degree


class Experts(Protocol):
    """The routed experts of a model."""

    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def hidden_dim(self) -> int: ...


class ModelShape(Protocol):
    """What the rules read of a model's dimensions."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def moe(self) -> Experts | None: ...


@dataclass(frozen=True)
class _Run:
    """One configuration on one machine."""

    job: JobConfig
    model: ModelShape
    world_size: int
    num_gpus: int

    @property
    def shard(self) -> int | None:
        return shard_degree(self.job.parallelism, self.world_size)

    @property
    def data_ranks(self) -> int | None:
        """Ranks that read different rows."""
        return self.shard and self.job.parallelism.data_parallel_replicate_degree * self.shard


def check(job: JobConfig, model: ModelShape, world_size: int, *, num_gpus: int) -> list[str]:
    """One line for every broken rule. `num_gpus`: GPUs of this machine; 0 means a CPU run."""
    run = _Run(job, model, world_size, num_gpus)
    return [line for rule in _RULES for line in rule(run)]


def check_vocabulary(job: JobConfig, model: ModelShape, tokenizer_size: int) -> list[str]:
    """`tokenizer_size` is the largest token id plus one, special tokens included."""
    if tokenizer_size <= model.vocab_size:
        return []
    return [
        f"model.tokenizer_path={job.model.tokenizer_path}: its {tokenizer_size} tokens do not fit "
        f"vocab_size={model.vocab_size} of {_flavor(job)}: choose a smaller tokenizer or another "
        f"flavor"
    ]


def _unlimited_or_positive(run: _Run) -> list[str]:
    values = {
        "parallelism.data_parallel_shard_degree": run.job.parallelism.data_parallel_shard_degree,
        "training.global_batch_size": run.job.training.global_batch_size,
        "validation.steps": run.job.validation.steps,
    }
    return [
        f"{key}={value} must be -1 or at least 1"
        for key, value in values.items()
        if value < 1 and value != -1
    ]


def _axes_of_this_version(run: _Run) -> list[str]:
    parallelism = run.job.parallelism
    degrees = {
        "tensor_parallel_degree": parallelism.tensor_parallel_degree,
        "context_parallel_degree": parallelism.context_parallel_degree,
        "pipeline_parallel_degree": parallelism.pipeline_parallel_degree,
    }
    return [
        f"parallelism.{key}={degree} is not available yet: this version trains with FSDP2, HSDP, "
        f"expert and expert tensor parallelism; choose 1"
        for key, degree in degrees.items()
        if degree > 1
    ]


def _ranks(run: _Run) -> list[str]:
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
            f"start it with a multiple, such as NGPU={product}"
        ]
    if sizes["dp_shard"] < 1:
        return []
    return [
        f"parallelism: {shown} = {product} ranks, but this run has {run.world_size}: start it with "
        f"NGPU={product}, or set parallelism.data_parallel_shard_degree=-1 to take what is there"
    ]


def _expert_block(run: _Run) -> list[str]:
    degrees, shard = run.job.parallelism, run.shard
    if shard is None:
        return []
    ep, etp = degrees.expert_parallel_degree, degrees.expert_tensor_parallel_degree
    cp, tp = degrees.context_parallel_degree, degrees.tensor_parallel_degree
    block = shard * cp * tp
    if block % (ep * etp) == 0:
        return []
    return [
        f"parallelism.expert_parallel_degree={ep} x expert_tensor_parallel_degree={etp} must "
        f"divide dp_shard {shard} x cp {cp} x tp {tp} = {block}: choose {_choices(block)}"
    ]


def _experts(run: _Run) -> list[str]:
    degree, moe = run.job.parallelism.expert_parallel_degree, run.model.moe
    slices = run.job.parallelism.expert_tensor_parallel_degree
    if moe is None:
        used = {
            f"parallelism.expert_parallel_degree={degree}": degree > 1,
            f"parallelism.expert_tensor_parallel_degree={slices}": slices > 1,
            "debug.moe_force_load_balance=true": run.job.debug.moe_force_load_balance,
        }
        return [
            f"{setting}: {_flavor(run.job)} has no experts; leave it out"
            for setting, is_set in used.items()
            if is_set
        ]
    if moe.num_experts % degree == 0:
        return []
    return [
        f"parallelism.expert_parallel_degree={degree} must divide num_experts={moe.num_experts}: "
        f"choose {_choices(moe.num_experts)}"
    ]


def _expert_hidden_dim(run: _Run) -> list[str]:
    degree, moe = run.job.parallelism.expert_tensor_parallel_degree, run.model.moe
    if moe is None or moe.hidden_dim % degree == 0:
        return []
    legal = ", ".join(str(size) for size in (1, 2, 4, 8) if moe.hidden_dim % size == 0)
    return [
        f"parallelism.expert_tensor_parallel_degree={degree} must divide the experts' "
        f"hidden_dim={moe.hidden_dim}: choose a divisor such as {legal}"
    ]


def _global_batch(run: _Run) -> list[str]:
    rows, local = run.job.training.global_batch_size, run.job.training.local_batch_size
    if run.data_ranks is None or rows < 1:
        return []
    step = local * run.data_ranks
    if rows % step == 0:
        return []
    return [
        f"training.global_batch_size={rows} must be a multiple of local_batch_size {local} x "
        f"{run.data_ranks} data ranks = {step}: choose {max(rows // step, 1) * step}"
    ]


def _sequence_length(run: _Run) -> list[str]:
    limit = run.model.max_seq_len
    lengths = {
        "training.seq_len": run.job.training.seq_len,
        "validation.seq_len": run.job.validation.seq_len or 0,
    }
    return [
        f"{key}={length} exceeds max_seq_len={limit} of {_flavor(run.job)}: choose at most {limit}"
        for key, length in lengths.items()
        if length > limit
    ]


def _compile(run: _Run) -> list[str]:
    if not run.job.compile.enable:
        return []
    return ["compile.enable=true is not available yet: choose false"]


def _cpu_offload(run: _Run) -> list[str]:
    if not run.job.training.enable_cpu_offload or run.num_gpus:
        return []
    return ["training.enable_cpu_offload=true needs a CUDA GPU, and none was found: choose false"]


def _precision(run: _Run) -> list[str]:
    training = run.job.training
    if (training.dtype, training.mixed_precision_param) != ("bfloat16", "float32"):
        return []
    return [
        "training.mixed_precision_param=float32 cannot restore parameters stored with "
        "training.dtype=bfloat16: choose training.dtype=float32"
    ]


def _recompute(run: _Run) -> list[str]:
    every = run.job.activation_checkpoint.selective_ac_option
    selective = run.job.activation_checkpoint.mode == "selective"
    if not selective or (every.isdecimal() and int(every) > 0):
        return []
    return [
        f"activation_checkpoint.selective_ac_option={every!r} must be a positive integer N: every "
        f"N-th layer is recomputed ('op' is not available)"
    ]


def _profiling(run: _Run) -> list[str]:
    profiling = run.job.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if not profiling.enable_profiling or profiling.profile_freq >= needed:
        return []
    return [
        f"profiling.profile_freq={profiling.profile_freq} must be at least profiler_warmup "
        f"{profiling.profiler_warmup} + profiler_active {profiling.profiler_active} = {needed}"
    ]


def _checkpoint_enabled(run: _Run) -> list[str]:
    checkpoint = run.job.checkpoint
    needing = {
        "create_seed_checkpoint=true": checkpoint.create_seed_checkpoint,
        f"initial_load_path={checkpoint.initial_load_path}": checkpoint.initial_load_path,
        f"load_step={checkpoint.load_step}": checkpoint.load_step != -1,
        "load_only=true": checkpoint.load_only,
    }
    return [
        f"checkpoint.{setting} has no effect without checkpoint.enable=true: set it"
        for setting, is_set in needing.items()
        if is_set and not checkpoint.enable
    ]


def _flavor(job: JobConfig) -> str:
    return f"{job.model.name} {job.model.flavor}"


def _choices(number: int) -> str:
    divisors = [str(n) for n in range(1, number + 1) if number % n == 0]
    *others, last = divisors
    return f"{', '.join(others)} or {last}" if others else last


_RULES: list[Callable[[_Run], list[str]]] = [
    _unlimited_or_positive,
    _axes_of_this_version,
    _ranks,
    _expert_block,
    _experts,
    _expert_hidden_dim,
    _global_batch,
    _sequence_length,
    _compile,
    _cpu_offload,
    _precision,
    _recompute,
    _profiling,
    _checkpoint_enabled,
]
