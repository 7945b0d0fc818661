"""Keys that are set and have no effect in a run, or on this machine: one line each, no mistake.

A cluster's file thereby starts on a laptop. Keys that name data or weights are errors instead,
since their user believes that they are read.
"""

import json
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from titan_moe.checks.base import Run, flat, narrow_keys
from titan_moe.config.job_config import (
    DATASETS_WITHOUT_COLUMNS,
    OPTIMIZER_KEYS,
    Dataset,
    JobConfig,
    Section,
    Validation,
)
from titan_moe.config.training_stages import training_stage_name, training_stages
from titan_moe.models.config import ModelConfig, matches, moe_layer_names

_GPU_ONLY = {
    "training.enable_cpu_offload": "parameters are in host memory",
    "profiling.enable_memory_snapshot": "a snapshot is of CUDA's allocator",
    "parallelism.enable_async_tensor_parallel": "CPUs do not read each other's memory",
    "comm.parameter_sms": "it has no multiprocessors",
    "comm.axes": "options are NCCL's",
    "comm.split_communicators": "communicators are NCCL's",
}


_OF_EXPERTS = (
    *("moe.*", "parallelism.expert_*"),
    *("debug.moe_force_load_balance", "debug.rout*"),
)


def notes(job: JobConfig, model: ModelConfig, world_size: int) -> list[str]:
    """Returns one line for each key that has no effect in any stage of this run, and one each for a
    warm-up that does not end and for adapters that have no weights to stand beside."""
    plain = flat(JobConfig())
    first, *others = [
        [
            f"{_named(key, value)} has no effect: {reason}"
            for patterns, reason in _reasons(Run(stage, model, world_size)).items()
            for key, value in flat(stage).items()
            if reason
            and value != plain.get(key)
            and any(fnmatch(key, pattern) for pattern in patterns.split())
        ]
        + _lone_axes(Run(stage, model, world_size))
        for _, stage in training_stages(job)
    ]
    lines = [line for line in first if all(line in other for other in others)]
    steps, warmup = job.training.steps, job.lr_scheduler.warmup_steps
    if warmup > (job.lr_scheduler.total_steps or steps):
        reach = f"training.steps={steps} ends at {steps / warmup:.2g} of the peak learning rate"
        lines.append(f"lr_scheduler.warmup_steps={warmup}: {reach}: choose fewer")
    lines += _random_base(job)
    lines += _uneven_rank(job, model)
    return lines + [
        f"{training_stage_name(job, number)} has no effect: training.steps={steps} ends before it"
        for number, stage in enumerate(job.stages)
        if stage.from_step > steps
    ]


def _named(key: str, value: Any) -> str:
    """Returns a key and its value; a table by its name alone."""
    return key if isinstance(value, dict) else f"{key}={_shown(value)}"


def _random_base(job: JobConfig) -> Iterator[str]:
    """Yields a line for adapters beside weights that are drawn, as runs that test something have
    them: the run loads none, and has no checkpoint to go on from."""
    config, folder = job.checkpoint, Path(job.job.dump_folder) / job.checkpoint.folder
    named = config.initial_load_path or config.initial_load_in_hf or any(folder.glob("step-*"))
    if job.lora.rank is None or config.create_seed_checkpoint or (config.enable and named):
        return
    yield (
        f"lora.rank={job.lora.rank}: adapters train beside random weights; "
        "checkpoint.initial_load_path names a model's"
    )


def _uneven_rank(job: JobConfig, model: ModelConfig) -> Iterator[str]:
    """Yields a line for adapters of experts whose rows torch's grouped GEMM does not take."""
    training, rank = job.training, job.lora.rank or 0
    size = 8 if training.mixed_precision_param == "bfloat16" else 4
    stacks = [f"{name}.moe.experts" for name in moe_layer_names(model)]
    adapted = any(matches(name, pattern) for name in stacks for pattern in job.lora.targets)
    # In float64 every product is a loop.
    if training.dtype != "float64" and adapted and rank % size:
        yield (
            f"lora.rank={rank}: on a GPU each product of the experts' adapters loops over the "
            f"experts, and waits for each; a multiple of {size} needs one launch"
        )


def _lone_axes(run: Run) -> list[str]:
    """Returns a line for each mesh axis with options that has one rank, and one for gradients'
    groups if no gradient is scattered."""
    sizes = run.job.parallelism.degrees
    fsdp = (run.shard or 1) * sizes["cp"]
    sizes |= {"fsdp": fsdp, "sequence": sizes["cp"] * sizes["tp"]}
    sizes["edp"] = fsdp * sizes["tp"] // (sizes["ep"] * sizes["etp"])
    alone = {f"axes.{axis}": "the axis has" for axis in run.job.comm.axes if sizes[axis] == 1}
    if run.job.comm.separate_reduce_scatter and sizes["fsdp"] == sizes["edp"] == 1:
        alone["separate_reduce_scatter"] = "fsdp and edp have"
    return [f"comm.{key} has no effect: {axis} one rank" for key, axis in alone.items()]


def narrow_lines(job: JobConfig) -> list[str]:
    """Returns a line if parameters or moments are kept in bfloat16, with what that costs."""
    if not (keys := narrow_keys(job)):
        return []
    kept = "parameters and moments are" if "training.dtype" in keys else "moments are"
    return [
        f"{' and '.join(keys)}=bfloat16: {kept} kept in bfloat16, which rounds away a change of "
        "less than 1/256 of a value"
    ]


def _reasons(run: Run) -> dict[str, str | bool]:
    """Returns why keys have no effect in `run`, by their patterns; False if they have one."""
    job, degrees, training = run.job, run.job.parallelism, run.job.training
    frozen = run.model.indexer is not None and training.indexer_stage == "dense"
    parts: list[Dataset | Validation] = [*training.blend]
    parts += [job.validation] if job.validation.enable else []
    readers = [part.dataset for part in parts if part.dataset and part.text_column is None]
    readers += [] if training.blend else [training.dataset]
    talks = training.dataset_format == "messages"
    of_some = {key for keys in OPTIMIZER_KEYS.values() for key in keys}
    unread = [f"optimizer.{key}" for key in of_some - {*OPTIMIZER_KEYS[job.optimizer.name]}]
    return _expert_reasons(run) | {
        "parallelism.enable_async_tensor_parallel": not run.pipelines_tp
        and "it needs tensor_parallel_degree above 1, compile.enable=true and backend=inductor",
        "parallelism.fsdp_accumulation": degrees.pipeline_parallel_degree > 1
        and "a pipeline's schedule gathers and reduces once a run",
        "parallelism.pipeline_parallel_layers_per_stage parallelism.pipeline_parallel_*_less_*": (
            degrees.module_fqns_per_model_part is not None
            and "module_fqns_per_model_part lists the stages"
        ),
        "training.mtp_loss_weight": not run.model.num_mtp_layers
        and f"{run.flavor} has no multi-token prediction without model.num_mtp_layers",
        "training.indexer_stage": run.model.indexer is None and f"{run.flavor} has no indexer",
        "moe.bias_*": (job.lora.rank is not None or frozen)
        and "routers are frozen beside adapters and in training.indexer_stage=dense",
        "moe.bias_update_speed": job.moe.bias_update == "quantile"
        and "moe.bias_update=quantile has no speed",
        "moe.bias_momentum": job.moe.bias_update != "quantile"
        and "moe.bias_update=quantile alone reads it",
        "training.on_spike": training.spike_factor is None and "training.spike_factor is not set",
        "training.text_column": (talks and "training.dataset_format is messages")
        or ({*readers} <= {*DATASETS_WITHOUT_COLUMNS} and "the data that reads it has no columns"),
        "training.messages": not talks and "training.dataset_format is text",
        "training.parse_special_tokens": job.model.tokenizer_path == "bytes"
        and "bytes are all that a text has",
        "validation.text_column": (
            job.validation.dataset is None or job.validation.dataset in DATASETS_WITHOUT_COLUMNS
        )
        and "validation.dataset names no data with columns",
        "checkpoint.load_only checkpoint.last_save_in_hf": not job.checkpoint.enable
        and "checkpoint.enable is false",
        "validation.dataset* validation.held_out_every": not job.validation.enable
        and "validation.enable is false",
        "debug.capture_step": job.debug.capture_step > training.steps
        and f"it is beyond training.steps={training.steps}",
        " ".join(unread): f"optimizer.name={job.optimizer.name} does not read it",
    }


def _expert_reasons(run: Run) -> dict[str, str | bool]:
    degrees = run.job.parallelism
    factor, backend = degrees.expert_parallel_capacity_factor, degrees.expert_parallel_comm_backend
    if run.model.moe is None:
        return {" ".join(_OF_EXPERTS): f"{run.flavor} has no experts"}
    travels = degrees.expert_parallel_degree * degrees.expert_tensor_parallel_degree > 1
    pairs = degrees.pipeline_parallel_schedule == "DualPipeV" and degrees.expert_parallel_degree > 1
    routing = run.job.debug.routing
    halves = degrees.expert_parallel_degree == 2  # A hot rank gets half of the rows.
    evens = (None, "W0", "W3", *(("W2", "W4", "W6", "W7") if halves else ()))
    is_even = routing is not None and run.job.debug.router_load in evens
    unbalanced = degrees.expert_parallel_degree == 1 and "expert_parallel_degree is 1"
    return {
        "parallelism.expert_parallel_capacity_factor parallelism.expert_parallel_overlap": (
            not travels and "expert_parallel_degree is 1"
        ),
        "parallelism.expert_parallel_comm_backend": backend == "balanced"
        and (unbalanced or (is_even and f"{routing} gives each rank as many rows")),
        "parallelism.pipeline_parallel_expert_parallel_overlap": not pairs
        and "it needs pipeline_parallel_schedule=DualPipeV and expert_parallel_degree above 1",
        "parallelism.expert_parallel_overflow": factor is None
        and "expert_parallel_capacity_factor is not set",
        "parallelism.expert_parallel_ranks_per_node": (
            backend not in ("auto", "deduplicated") or factor is not None
        )
        and "expert_parallel_comm_backend=deduplicated alone reads it",
    }


def without_experts(job: JobConfig) -> JobConfig:
    """Switches off what has no effect in a model without experts, so that no rule refuses it."""
    for key in flat(job):
        if any(fnmatch(key, pattern) for pattern in _OF_EXPERTS):
            job, _ = _reset(job, key)
    return job


def fit_to_cpu(job: JobConfig, *, bfloat16_units: bool) -> tuple[JobConfig, list[str]]:
    """Switches off what a machine without GPUs lacks.

    Returns:
        The configuration that runs here, and one line for each key that was changed.
    """
    reasons = dict(_GPU_ONLY)
    layouts = [job.parallelism, *(stage.parallelism for stage in job.stages)]
    if any(each.expert_parallel_comm_backend == "symmetric" for each in layouts):
        reasons["parallelism.expert_parallel_comm_backend"] = "CPUs have no NVSHMEM"
    if job.model.converters and not job.quantize.linear.float8.emulate:
        reasons["model.converters"] = (
            "it has no float8 units; quantize.linear.float8.emulate=true rounds as they do"
        )
    if job.compile.backend == "inductor" and shutil.which("g++") is None:
        reasons["compile.enable"] = "the C++ compiler g++ was not found"
    lines = []
    for key, reason in reasons.items():
        job, values = _reset(job, key)
        lines += [f"{key}={_shown(each)} has no effect on a CPU: {reason}" for each in values]
    key, training = "mixed_precision_param", job.training
    if bfloat16_units or training.dtype != "float32" or key in training.model_fields_set:
        return job, lines
    lines.append(f"training.{key}: float32, since this CPU has no bfloat16 units")
    return job.with_values(training={key: "float32"}), lines


def _reset(job: JobConfig, key: str) -> tuple[JobConfig, list[Any]]:
    """Sets a key to its default in the job and its stages; returns the values that it had."""
    table, name = key.split(".")
    default = getattr(getattr(JobConfig(), table), name)
    found: list[Any] = []

    def reset(section: Section) -> Section:
        value = getattr(section, name)
        if value == default:
            return section
        found.append(value)
        return section.model_copy(update={name: default})

    changes: dict[str, Any] = {table: reset(getattr(job, table))}
    if table == "parallelism":
        changes["stages"] = [
            stage.model_copy(update={table: reset(stage.parallelism)}) for stage in job.stages
        ]
    return job.model_copy(update=changes), found[:1]


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=lambda table: table.model_dump(exclude_unset=True))
