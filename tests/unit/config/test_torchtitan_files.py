"""Files with the keys and values of torchtitan's own MoE models start."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from titan_moe.config.parse import read_job
from titan_moe.config.translate import put
from titan_moe.train import prepare_job

# What its files have in common: much of it switches off what is off anyway.
_COMMON: dict[str, Any] = {
    "job.dump_folder": "./outputs",
    "job.description": "a training",
    "job.print_config": False,
    "profiling.enable_profiling": False,
    "profiling.save_traces_folder": "profile_trace",
    "profiling.profile_freq": 10,
    "profiling.enable_memory_snapshot": False,
    "profiling.save_memory_snapshot_folder": "memory_snapshot",
    "metrics.log_freq": 1,
    "metrics.disable_color_printing": False,
    "metrics.enable_tensorboard": False,
    "metrics.save_tb_folder": "tb",
    "metrics.enable_wandb": False,
    "model.hf_assets_path": "./tests/assets/tokenizer",
    "optimizer.name": "AdamW",
    "optimizer.lr": 8e-4,
    "optimizer.eps": 1e-8,
    "lr_scheduler.warmup_steps": 2,
    "lr_scheduler.decay_ratio": 0.8,
    "lr_scheduler.decay_type": "linear",
    "lr_scheduler.min_lr_factor": 0.0,
    "training.local_batch_size": 8,
    "training.seq_len": 2048,
    "training.max_norm": 1.0,
    "training.steps": 10,
    "training.dataset": "c4_test",
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.fsdp_reshard_after_forward": "default",
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.enable_async_tensor_parallel": False,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "parallelism.expert_tensor_parallel_degree": 1,
    "checkpoint.enable": False,
    "checkpoint.folder": "checkpoint",
    "checkpoint.interval": 10,
    "checkpoint.last_save_model_only": False,
    "checkpoint.export_dtype": "float32",
    "checkpoint.async_mode": "disabled",
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
    "compile.enable": False,
    "compile.components": ["model", "loss"],
    "quantize.linear.float8.enable_fsdp_float8_all_gather": False,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": False,
    "quantize.linear.float8.filter_fqns": ["output", "router.gate"],
    "quantize.grouped_mm.float8.fqns": ["experts"],
    "validation.enable": False,
    "validation.dataset": "c4_validation",
    "validation.freq": 5,
    "validation.steps": 10,
}
_MX = {
    "quantize.linear.mx.filter_fqns": ["output", "router.gate"],
    "quantize.grouped_mm.mx.fqns": ["experts"],
}
_LARGE = {
    "training.seq_len": 4096,
    "training.local_batch_size": 4,
    "training.dataset": "c4",
    "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
    "compile.enable": True,
}
_SCOUT = {
    "training.seq_len": 8192,
    "parallelism.tensor_parallel_degree": 8,
    "parallelism.expert_tensor_parallel_degree": 8,
    "activation_checkpoint.mode": "full",
}
# Model, flavor, ranks, and what its file has besides.
_FILES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("deepseek_v3", "debugmodel", 1, {}),
    ("deepseek_v3", "16B", 8, {**_LARGE, "parallelism.expert_parallel_degree": 8}),
    ("deepseek_v3", "671B", 512, _LARGE),
    ("deepseek_v3", "671B", 512, {**_LARGE, "compile.components": ["loss"]}),
    ("qwen3", "debugmodel_moe", 1, {"training.seq_len": 4096}),
    ("llama4", "debugmodel", 1, _MX),
    ("llama4", "17bx16e", 64, {**_MX, **_SCOUT}),
    ("llama4", "17bx128e", 256, {**_SCOUT, "parallelism.pipeline_parallel_degree": 4}),
    ("gpt_oss", "debugmodel", 1, {"activation_checkpoint.mode": "none"}),
]


@pytest.mark.parametrize(("name", "flavor", "ranks", "more"), _FILES)
def test_a_file_is_accepted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    flavor: str,
    ranks: int,
    more: dict[str, Any],
) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: program)
    tables: dict[str, Any] = {}
    for key, value in {**_COMMON, "model.name": name, "model.flavor": flavor, **more}.items():
        put(tables, key, value)
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(tables))
    job, notes = read_job(["--job.config_file", str(path)])
    assert notes == []
    job, _ = prepare_job(job, ranks, {})
    assert (job.activation_checkpoint.mode == "full") == ("17b" in flavor)
    assert job.training.global_batch_size > 0
