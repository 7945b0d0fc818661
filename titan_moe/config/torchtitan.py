"""Every key of a torchtitan 0.2.2 file, and what becomes of it here: data, read by translate.py.

`TABLES` has all of its keys. One that this version has is read as it stands; `VALUES` are those of
its values that have another name here. One without an equivalent has no effect where the numbers
are the same without it, and is refused with a remedy where they would not be.
"""

from typing import Any, Literal, NamedTuple

Fate = Literal["same", "no effect", "refused"]
_NONE: Fate = "no effect"
_REFUSED: Fate = "refused"


class Key(NamedTuple):
    """A key of torchtitan."""

    default: Any
    """torchtitan's. None: the key is absent, since TOML has no such value."""
    fate: Fate = "same"
    note: str = ""
    """What differs, why it has no effect, or what to do instead."""


_WORKERS = "one reader reads ahead, as training.dataloader.prefetch_factor says"
_KEPT = "what is recomputed is set by activation_checkpoint.mode and selective_ac_option"
_MX = "only experts run in mxfp8, by quantize.grouped_mm.mx: choose quantize.linear.float8"
_EXTENSION = "code is not imported from a config: add a folder to titan_moe/models instead"
_TORCHFT = "torchft is not used"

TABLES: dict[str, dict[str, Key]] = {
    "job": {
        "config_file": Key(None, _NONE, "the file named on the command line is read"),
        "dump_folder": Key("./outputs"),
        "description": Key("default job"),
        "print_config": Key(False),
        "save_config_file": Key(None, _NONE, "always saved as config.toml in job.dump_folder"),
        "custom_config_module": Key("", _REFUSED, _EXTENSION),
    },
    "profiling": {
        "enable_profiling": Key(False),
        "save_traces_folder": Key("profile_traces"),
        "profile_freq": Key(10),
        "profiler_active": Key(1),
        "profiler_warmup": Key(3),
        "enable_memory_snapshot": Key(False, note="needs a GPU"),
        "save_memory_snapshot_folder": Key("memory_snapshot"),
    },
    "metrics": {
        "log_freq": Key(10),
        "enable_tensorboard": Key(False),
        "disable_color_printing": Key(False),
        "save_tb_folder": Key("tb"),
        "save_for_all_ranks": Key(False, _NONE, "metrics are of all ranks, and written once"),
        "enable_wandb": Key(False),
    },
    "model": {
        "name": Key("llama3", note="no Llama 3"),
        "flavor": Key("debugmodel"),
        "hf_assets_path": Key("./tests/assets/tokenizer"),
        "tokenizer_path": Key(None, note="goes before hf_assets_path"),
        "converters": Key([]),
        "print_after_conversion": Key(False, _NONE, "what runs in float8 is always logged"),
    },
    "optimizer": {
        "name": Key("AdamW"),
        "lr": Key(8e-4),
        "beta1": Key(0.9),
        "beta2": Key(0.95),
        "eps": Key(1e-8),
        "weight_decay": Key(0.1, note="not of norms and biases; torchtitan decays those too"),
        "implementation": Key("fused"),
        "early_step_in_backward": Key(
            False, _REFUSED, "the optimizer steps once, after clipping: leave it out"
        ),
    },
    "lr_scheduler": {
        "warmup_steps": Key(
            200, note="torchtitan shortens a warm-up that is longer than the schedule"
        ),
        "total_steps": Key(None),
        "decay_ratio": Key(None, note="the decay begins one step sooner than torchtitan's"),
        "decay_type": Key("linear"),
        "min_lr_factor": Key(0.0, note="reached by the last step; torchtitan stops just before"),
    },
    "training": {
        "dataset": Key("c4_test", note="c4, c4_validation and c4_test are known here too"),
        "dataset_path": Key(None),
        "local_batch_size": Key(8),
        "global_batch_size": Key(-1),
        "seq_len": Key(2048),
        "max_norm": Key(1.0),
        "steps": Key(10000),
        "enable_cpu_offload": Key(False),
        "dtype": Key("float32"),
        "mixed_precision_param": Key("bfloat16"),
        "mixed_precision_reduce": Key("float32"),
        "gc_freq": Key(50),
        "gc_debug": Key(False, _NONE, "use Python's gc.set_debug"),
    },
    "training.dataloader": {
        "num_workers": Key(0, _NONE, _WORKERS),
        "persistent_workers": Key(False, _NONE, _WORKERS),
        "pin_memory": Key(False, _NONE, "not a choice here"),
        "prefetch_factor": Key(None, note="steps' worth of batches"),
    },
    "parallelism": {
        "data_parallel_replicate_degree": Key(1),
        "data_parallel_shard_degree": Key(-1),
        "fsdp_reshard_after_forward": Key("default"),
        "tensor_parallel_degree": Key(1),
        "disable_loss_parallel": Key(
            False, _NONE, "the loss is always computed by vocabulary, with the same value"
        ),
        "enable_async_tensor_parallel": Key(False),
        "pipeline_parallel_degree": Key(1),
        "module_fqns_per_model_part": Key(None),
        "pipeline_parallel_first_stage_less_layers": Key(1, note="where layers are cut differs"),
        "pipeline_parallel_last_stage_less_layers": Key(1, note="where layers are cut differs"),
        "pipeline_parallel_layers_per_stage": Key(None),
        "pipeline_parallel_schedule": Key("1F1B", note="in upper or lower case"),
        "pipeline_parallel_schedule_csv": Key(
            "",
            _REFUSED,
            "custom schedules are not available: set parallelism.pipeline_parallel_schedule",
        ),
        "pipeline_parallel_microbatch_size": Key(1),
        "pipeline_parallel_expert_parallel_overlap": Key(
            True, _NONE, "DualPipeV runs a pair's forward before its backward"
        ),
        "context_parallel_degree": Key(1),
        "context_parallel_load_balancer": Key("headtail"),
        "context_parallel_rotate_method": Key("allgather"),
        "expert_parallel_degree": Key(1),
        "expert_tensor_parallel_degree": Key(1),
        "expert_parallel_comm_backend": Key("standard"),
    },
    "checkpoint": {
        "enable": Key(False),
        "enable_ft_dataloader_checkpoints": Key(True, _NONE, _TORCHFT),
        "folder": Key("checkpoint"),
        "interval": Key(500),
        "initial_load_path": Key(None, note="a step folder of this program, or Hugging Face's"),
        "initial_load_model_only": Key(True),
        "initial_load_in_hf": Key(False),
        "initial_load_in_hf_quantized": Key(
            False, _NONE, "quantised weights are recognised by themselves"
        ),
        "last_save_model_only": Key(True, note="here the last save can be resumed"),
        "last_save_in_hf": Key(False),
        "export_dtype": Key("float32"),
        "async_mode": Key("disabled"),
        "keep_latest_k": Key(10),
        "load_step": Key(-1),
        "exclude_from_loading": Key([]),
        "enable_first_step_checkpoint": Key(False),
        "create_seed_checkpoint": Key(False),
        "load_only": Key(False),
    },
    "activation_checkpoint": {
        "mode": Key("selective"),
        "selective_ac_option": Key("2"),
        "per_op_sac_force_recompute_mm_shapes_by_fqns": Key(["moe.router.gate"], _NONE, _KEPT),
        "early_stop": Key(
            False, _NONE, "recomputation ends when it has made what the backward needs"
        ),
        "memory_budget": Key(0.5, _NONE, _KEPT),
        "visualize_memory_budget_pareto": Key(False, _NONE, _KEPT),
        "preserve_rng_state": Key(True, _NONE, "layers draw no random numbers"),
        "determinism_check": Key("default", _NONE, "routing is replayed, never redone"),
        "debug": Key(False, _NONE, "for torch's own messages"),
    },
    "compile": {
        "enable": Key(False),
        "components": Key(["model", "loss"]),
        "backend": Key("inductor"),
    },
    "quantize.linear.float8": {
        "enable_fsdp_float8_all_gather": Key(
            False,
            _REFUSED,
            "weights are gathered in the compute type and rounded after: leave it out",
        ),
        "precompute_float8_dynamic_scale_for_fsdp": Key(
            False, _NONE, "scales are computed where they are used"
        ),
        "recipe_name": Key(None, note="left out, torchtitan scales by tensor"),
        "filter_fqns": Key([], note="the output layer and routers never run in float8"),
        "emulate": Key(False),
    },
    "quantize.linear.mx": {
        "mxfp8_dim1_cast_kernel_choice": Key("triton", _NONE, _MX),
        "recipe_name": Key("mxfp8_cublas", _NONE, _MX),
        "filter_fqns": Key(["output"], _NONE, _MX),
    },
    "quantize.grouped_mm.float8": {"fqns": Key([])},
    "quantize.grouped_mm.mx": {"recipe_name": Key("mxfp8"), "fqns": Key([])},
    "comm": {
        "init_timeout_seconds": Key(300),
        "train_timeout_seconds": Key(100),
        "trace_buf_size": Key(20000),
        "save_traces_folder": Key("comm_traces"),
        "save_traces_file_prefix": Key("rank_", _NONE, "one file holds the traces of all ranks"),
        "mode": Key(
            "default",
            _REFUSED,
            "nothing would be trained: use titan-moe check, or titan-moe simulate step",
        ),
    },
    "memory_estimation": {
        "enable": Key(False, _REFUSED, "nothing would be trained: use titan-moe memory"),
        "disable_fake_mode": Key(False, _NONE, "for the estimate alone"),
    },
    "fault_tolerance": {
        "enable": Key(
            False, _REFUSED, f"{_TORCHFT}: restart the run and it resumes from its checkpoint"
        ),
        "process_group": Key("gloo", _NONE, _TORCHFT),
        "process_group_timeout_ms": Key(10000, _NONE, _TORCHFT),
        "replica_id": Key(0, _NONE, _TORCHFT),
        "group_size": Key(0, _NONE, _TORCHFT),
        "min_replica_size": Key(1, _NONE, _TORCHFT),
        "semi_sync_method": Key(None, _NONE, _TORCHFT),
    },
    "experimental": {
        "custom_import": Key("", _REFUSED, _EXTENSION),
        "custom_args_module": Key("", _REFUSED, _EXTENSION),
    },
    "validation": {
        "enable": Key(False),
        "dataset": Key(
            "c4_validation", note="left out here: held-out documents of the training data"
        ),
        "dataset_path": Key(None),
        "local_batch_size": Key(8),
        "seq_len": Key(2048, note="left out here: training.seq_len"),
        "freq": Key(10),
        "steps": Key(-1, note="a number is needed for c4, which has no end"),
    },
    "validation.dataloader": {
        "num_workers": Key(0, _NONE, _WORKERS),
        "persistent_workers": Key(False, _NONE, _WORKERS),
        "pin_memory": Key(False, _NONE, "not a choice here"),
        "prefetch_factor": Key(None, _NONE, "validation reads as training does"),
    },
    "debug": {
        "seed": Key(None, note="left out, torchtitan draws one"),
        "deterministic": Key(False),
        "deterministic_warn_only": Key(False),
        "moe_force_load_balance": Key(False),
    },
}

# Values that have another name here, or that only make a run faster or slower.
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
}

# Values at keys of ours that are refused with more than the list of those allowed.
VALUE_REMEDIES: dict[str, dict[str, str]] = {
    "model.converters": dict.fromkeys(["mx", "quantize.linear.mx"], _MX),
    "checkpoint.exclude_from_loading": {
        "lr_scheduler": (
            "the learning rate follows from the step: name 'train_state' to count from step 1 again"
        )
    },
}
