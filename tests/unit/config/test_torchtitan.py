"""Every key that a torchtitan 0.2 file may hold is understood or refused with a remedy."""

import pytest

from titan_moe.config.errors import ConfigError
from titan_moe.config.parse import known_keys, load_job
from titan_moe.config.torchtitan import (
    REPLACEMENTS,
    VALUE_REPLACEMENTS,
    replacement,
    unknown_key,
)

# The keys of the released package torchtitan 0.2.2, table by table.
TORCHTITAN_KEYS = {
    "job": (
        "config_file dump_folder description print_config save_config_file custom_config_module"
    ),
    "profiling": (
        "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
        "enable_memory_snapshot save_memory_snapshot_folder"
    ),
    "metrics": (
        "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks "
        "enable_wandb"
    ),
    "model": ("name flavor hf_assets_path tokenizer_path converters print_after_conversion"),
    "optimizer": ("name lr beta1 beta2 eps weight_decay implementation early_step_in_backward"),
    "lr_scheduler": ("warmup_steps total_steps decay_ratio decay_type min_lr_factor"),
    "training": (
        "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps "
        "enable_cpu_offload dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug"
    ),
    "training.dataloader": ("num_workers persistent_workers pin_memory prefetch_factor"),
    "parallelism": (
        "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
        "tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel "
        "pipeline_parallel_degree module_fqns_per_model_part "
        "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
        "pipeline_parallel_layers_per_stage pipeline_parallel_schedule "
        "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size "
        "pipeline_parallel_expert_parallel_overlap context_parallel_degree "
        "context_parallel_load_balancer context_parallel_rotate_method expert_parallel_degree "
        "expert_tensor_parallel_degree expert_parallel_comm_backend"
    ),
    "checkpoint": (
        "enable enable_ft_dataloader_checkpoints folder interval initial_load_path "
        "initial_load_model_only initial_load_in_hf initial_load_in_hf_quantized "
        "last_save_model_only last_save_in_hf export_dtype async_mode keep_latest_k load_step "
        "exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint load_only"
    ),
    "activation_checkpoint": (
        "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop "
        "memory_budget visualize_memory_budget_pareto preserve_rng_state determinism_check debug"
    ),
    "compile": ("enable components backend"),
    "quantize.linear.float8": (
        "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name "
        "filter_fqns emulate"
    ),
    "quantize.linear.mx": ("mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns"),
    "quantize.grouped_mm.float8": ("fqns"),
    "quantize.grouped_mm.mx": ("recipe_name fqns"),
    "comm": (
        "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder "
        "save_traces_file_prefix mode"
    ),
    "memory_estimation": ("enable disable_fake_mode"),
    "fault_tolerance": (
        "enable process_group process_group_timeout_ms replica_id group_size min_replica_size "
        "semi_sync_method"
    ),
    "experimental": ("custom_import custom_args_module"),
    "validation": ("enable dataset dataset_path local_batch_size seq_len freq steps"),
    "validation.dataloader": ("num_workers persistent_workers pin_memory prefetch_factor"),
    "debug": ("seed deterministic deterministic_warn_only moe_force_load_balance"),
}

KEYS = [f"{table}.{key}" for table, keys in TORCHTITAN_KEYS.items() for key in keys.split()]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_torchtitan_is_ours_or_has_a_remedy(key: str) -> None:
    assert (key in known_keys()) != (replacement(key) is not None)


def test_no_remedy_is_left_over() -> None:
    for entry in REPLACEMENTS:
        assert any(key == entry or key.startswith(f"{entry}.") for key in KEYS), entry


@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ("training.stepz", "training.steps"),
        ("trainig.steps", "training.steps"),
        ("training.lr", "optimizer.lr"),
        ("parallelism.expert_paralel_degree", "parallelism.expert_parallel_degree"),
        ("expert_parallel_degree", "parallelism.expert_parallel_degree"),
        ("model.warmup_step", "lr_scheduler.warmup_steps"),
        ("validation.seqlen", "validation.seq_len"),
        ("training.prefetch_factor", "training.dataloader.prefetch_factor"),
    ],
)
def test_the_nearest_key_is_named(misspelt: str, right: str) -> None:
    line = unknown_key(misspelt, "3", known_keys(), source="command line")
    assert line.endswith(f"did you mean {right}?")


def test_a_key_like_no_other_names_none() -> None:
    line = unknown_key("zzz.qqq", "3", known_keys(), source="command line")
    assert "did you mean" not in line and "--help" in line


@pytest.mark.parametrize(("key", "value"), VALUE_REPLACEMENTS)
def test_a_value_of_torchtitan_has_a_remedy(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_job([f"--{key}", value])
    (line,) = error.value.lines
    assert f'{key} = "{value}"' in line and line.endswith(VALUE_REPLACEMENTS[key, value])
