"""What to say about a key that this version does not know.

`REPLACEMENTS` holds every key of a torchtitan 0.2 file without an equivalent here; an entry for a
table stands for all of its keys. For anything else the nearest key is named. `VALUE_REPLACEMENTS`
holds values that have another name here.
"""

from collections.abc import Iterable
from difflib import SequenceMatcher

_WORKERS = "one background thread reads ahead: set training.dataloader.prefetch_factor"
_BY_LAYER = "what is recomputed is set by activation_checkpoint.mode and selective_ac_option"
_MX = "mxfp8 has not been seen on hardware: set the float8 table instead"
_GATHERED = "weights are gathered in the compute type and scaled after: leave it out"
_EXTENSION = "code is not imported from a config: add a folder to titan_moe/models instead"

REPLACEMENTS: dict[str, str] = {
    "job.config_file": "name the file on the command line: CONFIG_FILE=PATH ./run_train.sh",
    "job.save_config_file": "always saved as config.toml in job.dump_folder: leave it out",
    "job.custom_config_module": _EXTENSION,
    "metrics.save_for_all_ranks": "metrics are of all ranks, written once: leave it out",
    "model.print_after_conversion": "what runs in float8 is always logged: leave it out",
    "optimizer.early_step_in_backward": "the optimizer steps once, after clipping: leave it out",
    "training.gc_debug": "use Python's gc.set_debug: leave it out",
    "training.dataloader.num_workers": _WORKERS,
    "training.dataloader.persistent_workers": _WORKERS,
    "training.dataloader.pin_memory": "not a choice here: leave it out",
    "parallelism.disable_loss_parallel": (
        "no rank ever holds whole logits: the loss is always computed by vocabulary; leave it out"
    ),
    "parallelism.enable_async_tensor_parallel": (
        "asynchronous tensor parallelism has not been seen on hardware: leave it out"
    ),
    "parallelism.pipeline_parallel_schedule_csv": (
        "custom schedules are not available: set parallelism.pipeline_parallel_schedule"
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": "torchft is not used: leave it out",
    "checkpoint.initial_load_in_hf_quantized": (
        "quantised weights are recognised by themselves: set checkpoint.initial_load_in_hf alone"
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": _BY_LAYER,
    "activation_checkpoint.memory_budget": _BY_LAYER,
    "activation_checkpoint.visualize_memory_budget_pareto": _BY_LAYER,
    "activation_checkpoint.early_stop": "recompute always covers the whole layer: leave it out",
    "activation_checkpoint.preserve_rng_state": "layers draw no random numbers: leave it out",
    "activation_checkpoint.determinism_check": "routing is replayed, never redone: leave it out",
    "activation_checkpoint.debug": "leave it out",
    "quantize.linear.mx": _MX,
    "quantize.grouped_mm.mx": _MX,
    "quantize.linear.float8.enable_fsdp_float8_all_gather": _GATHERED,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": _GATHERED,
    "comm.trace_buf_size": "set TORCH_NCCL_TRACE_BUFFER_SIZE in the environment",
    "comm.save_traces_folder": "set TORCH_NCCL_DEBUG_INFO_TEMP_FILE in the environment",
    "comm.save_traces_file_prefix": "set TORCH_NCCL_DEBUG_INFO_TEMP_FILE in the environment",
    "comm.mode": "dry runs on fake ranks are not available: leave it out",
    "memory_estimation": "memory estimates are not available yet: leave the table out",
    "fault_tolerance": "torchft is not used: restart the run and it resumes from its checkpoint",
    "experimental": _EXTENSION,
    "validation.dataloader": "validation reads as training does: set training.dataloader",
}

VALUE_REPLACEMENTS: dict[tuple[str, str], str] = {
    ("parallelism.context_parallel_rotate_method", "alltoall"): (
        "passing keys and values from rank to rank is called 'ring' here: choose it, "
        "'allgather' or 'ulysses'"
    ),
    ("parallelism.context_parallel_load_balancer", "ptrr"): (
        "balancing by documents is not available: choose 'headtail' or 'none'"
    ),
}


def unknown_key(key: str, value: str, known: Iterable[str], *, source: str) -> str:
    """The one line about an unknown dotted `key`: what replaces it, else which key is nearest."""
    given = f"{key} = {value} ({source}): "
    if remedy := replacement(key):
        return given + remedy
    if near := _nearest(key, known):
        return f"{given}no such key; did you mean {near}?"
    return f"{given}no such key; --help lists all of them"


def replacement(key: str) -> str | None:
    """The remedy for `key` or for the innermost table around it."""
    parts = key.split(".")
    tables = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((REPLACEMENTS[table] for table in tables if table in REPLACEMENTS), None)


def value_replacement(key: str, value: object) -> str | None:
    """The remedy for a value that torchtitan knows at a key of ours, and we do not."""
    return VALUE_REPLACEMENTS.get((key, value)) if isinstance(value, str) else None


def _nearest(key: str, known: Iterable[str]) -> str | None:
    """The most similar key, if any is: its last part counts more than the table it is in."""

    def similarity(candidate: str) -> float:
        leaves = SequenceMatcher(None, _leaf(key), _leaf(candidate)).ratio()
        return (2 * leaves + SequenceMatcher(None, key, candidate).ratio()) / 3

    best = max(known, key=similarity)
    return best if similarity(best) > 0.6 else None


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
