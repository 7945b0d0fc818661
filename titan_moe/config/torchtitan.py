"""Keys and values that a TOML file may have although they are no keys here.

A key of torchtitan 0.2.2 that exists here is read as it stands. Of its others, one without which
the numbers are the same has no effect, and one without which they would not be is refused.
"""

from typing import Any

from titan_moe.config.pipeline import SCHEDULES

_WORKERS = "one reader reads ahead, as training.dataloader.prefetch_factor says"
_RECOMPUTE = "what is recomputed is set by activation_checkpoint.mode and selective_ac_option"
_MX = "only experts run in mxfp8, by quantize.grouped_mm.mx"
_EXTENSION = "torchtitan's code has no place here: name a module of yours in job.imports"
_TORCHFT = "torchft is not used"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"

IGNORED: dict[str, str] = {
    "job.config_file": "the file named on the command line is read",
    "job.save_config_file": "always saved as config.toml in job.dump_folder",
    "metrics.disable_color_printing": "lines have no colours",
    "metrics.save_for_all_ranks": "metrics are of all ranks, and written once",
    "model.print_after_conversion": "what runs in float8 is always logged",
    "training.gc_debug": "use Python's gc.set_debug",
    "training.dataloader.num_workers": _WORKERS,
    "training.dataloader.persistent_workers": _WORKERS,
    "training.dataloader.pin_memory": "not a choice here",
    "parallelism.disable_loss_parallel": "the loss is always computed by vocabulary",
    "checkpoint.enable_ft_dataloader_checkpoints": _TORCHFT,
    "checkpoint.initial_load_in_hf_quantized": "quantised weights are recognised by themselves",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": _RECOMPUTE,
    "activation_checkpoint.early_stop": "recomputation ends when the backward has what it needs",
    "activation_checkpoint.memory_budget": _RECOMPUTE,
    "activation_checkpoint.visualize_memory_budget_pareto": _RECOMPUTE,
    "activation_checkpoint.preserve_rng_state": "layers draw no random numbers",
    "activation_checkpoint.determinism_check": "routing is replayed, never redone",
    "activation_checkpoint.debug": "for torch's own messages",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": (
        "weights are gathered in the compute type and rounded after"
    ),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": (
        "scales are computed where they are used"
    ),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": _MX,
    "quantize.linear.mx.recipe_name": _MX,
    "quantize.linear.mx.filter_fqns": _MX,
    "comm.save_traces_file_prefix": "one file holds the traces of all ranks",
    "memory_estimation.disable_fake_mode": "for the estimate alone",
    "fault_tolerance.process_group": _TORCHFT,
    "fault_tolerance.process_group_timeout_ms": _TORCHFT,
    "fault_tolerance.replica_id": _TORCHFT,
    "fault_tolerance.group_size": _TORCHFT,
    "fault_tolerance.min_replica_size": _TORCHFT,
    "fault_tolerance.semi_sync_method": _TORCHFT,
    "validation.dataloader.num_workers": _WORKERS,
    "validation.dataloader.persistent_workers": _WORKERS,
    "validation.dataloader.pin_memory": "not a choice here",
    "validation.dataloader.prefetch_factor": "validation reads as training does",
}
"""Key of torchtitan -> why the numbers are the same without it."""

REFUSED: dict[str, str] = {
    "job.custom_config_module": _EXTENSION,
    "optimizer.early_step_in_backward": ("the optimizer steps once, after clipping: leave it out"),
    "parallelism.pipeline_parallel_schedule_csv": (
        "custom schedules are not available: set parallelism.pipeline_parallel_schedule"
    ),
    "comm.mode": "nothing would be trained: use titan-moe check, or titan-moe simulate step",
    "memory_estimation.enable": "nothing would be trained: use titan-moe memory",
    "fault_tolerance.enable": f"{_TORCHFT}: restart the run and it resumes from its checkpoint",
    "experimental.custom_import": _EXTENSION,
    "experimental.custom_args_module": _EXTENSION,
}
"""Key of torchtitan that asks for other numbers or another program -> the remedy."""

VALUES: dict[str, dict[str, str]] = {
    "model.converters": {
        "float8": "quantize.linear.float8",
        "quantize.dense.float8": "quantize.linear.float8",
        "quantize.moe.float8": "quantize.grouped_mm.float8",
    },
    "parallelism.context_parallel_load_balancer": {"ptrr": "headtail"},
    "parallelism.context_parallel_rotate_method": {"alltoall": "ring"},
    "parallelism.expert_parallel_comm_backend": {"deepep": "deduplicated"},
    "activation_checkpoint.mode": {"memory_budget": "full"},
    _SCHEDULE: {name.lower(): name for name in SCHEDULES},
}
"""Key -> values that have another name here, or that only make a run faster or slower. torchtitan
reads names of schedules in any case."""

_ASKS_FOR_NOTHING: tuple[Any, ...] = (None, False, "false", "False", "", [], "default")


def translate(keys: dict[str, Any]) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Reads dotted keys as a torchtitan file means them.

    Returns:
        The keys that are read here, a note for each that is read in another way or not at all, and
        the remedy for each that is refused.
    """
    kept: dict[str, Any] = {}
    notes: list[str] = []
    refused: dict[str, str] = {}
    for key, value in keys.items():
        if key not in IGNORED and key not in REFUSED:
            kept[key] = _renamed(key, value)
            if kept[key] != value and key != _SCHEDULE:
                notes.append(f"{key}={value} is read as {kept[key]}")
        elif value in _ASKS_FOR_NOTHING:
            continue
        elif key in REFUSED:
            refused[key] = REFUSED[key]
        else:
            notes.append(f"{key}={value} has no effect here: {IGNORED[key]}")
    return kept, notes, refused


def _renamed(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_renamed(key, each) for each in value]
    names = VALUES.get(key, {})
    return names.get(value.lower(), value) if isinstance(value, str) else value
