"""Files of torchtitan 0.2.2 are read: every key is one of ours, without effect, or refused."""

from pathlib import Path

import pytest

from tests.support.paths import REPO
from tests.support.refusals import config_file, refusal
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import known_keys, load_job, read_job, tomllib
from titan_moe.config.torchtitan import IGNORED, REFUSED
from titan_moe.prepare.job import prepare

_TEXT = (REPO / "tests/support/torchtitan_keys.toml").read_text(encoding="utf-8")
_THEIRS = {f"{table}.{name}" for table, names in tomllib.loads(_TEXT).items() for name in names}


def test_every_key_of_torchtitan_is_ours_ignored_or_refused() -> None:
    ours, ignored, refused = set(known_keys()), set(IGNORED), set(REFUSED)
    assert ours >= _THEIRS - ignored - refused and ignored | refused <= _THEIRS
    assert not ours & (ignored | refused) and not ignored & refused


@pytest.mark.parametrize("value", ["true", '"x"', "3"])
@pytest.mark.parametrize("key", [*IGNORED][1::5])
def test_ignored_key_is_a_note(tmp_path: Path, key: str, value: str) -> None:
    for argv in (config_file(tmp_path, f"{key} = {value}"), [f"--{key}", value.strip('"')]):
        job, (note,) = read_job(argv)
        assert job == JobConfig() and note.startswith(f"{key}=") and note.endswith(IGNORED[key])


@pytest.mark.parametrize("key", REFUSED)
def test_refused_key_has_a_remedy(tmp_path: Path, key: str) -> None:
    for argv in (config_file(tmp_path, f"{key} = true"), [f"--{key}"]):
        line = refusal(load_job, argv)
        assert line.startswith(f"{key} = ") and line.endswith(REFUSED[key])
    for argv in (config_file(tmp_path, f"{key} = false"), [f"--{key}=false"]):
        assert read_job(argv) == (JobConfig(), [])


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("model.converters", ["float8"], ["quantize.linear.float8"]),
        ("parallelism.context_parallel_rotate_method", "alltoall", "ring"),
        ("parallelism.expert_parallel_comm_backend", "deepep", "deduplicated"),
        ("activation_checkpoint.mode", "memory_budget", "full"),
        ("parallelism.pipeline_parallel_schedule", "interleaved1f1b", "Interleaved1F1B"),
        ("parallelism.pipeline_parallel_schedule", "GPIPE", "GPipe"),
    ],
)
def test_value_with_another_name_is_read_as_ours(
    tmp_path: Path, key: str, value: str | list[str], ours: object
) -> None:
    text = value if isinstance(value, str) else ",".join(value)
    table, name = key.split(".")
    for argv in (config_file(tmp_path, f"{key} = {value!r}"), [f"--{key}", text]):
        job, notes = read_job(argv)
        assert getattr(getattr(job, table), name) == ours
        assert [note.startswith(f"{key}={value} is read as") for note in notes] == (
            [] if "schedule" in key else [True]
        )


def test_tables_without_keys_are_read(tmp_path: Path) -> None:
    tables = {key.rpartition(".")[0] for key in _THEIRS} | {"quantize", "quantize.linear"}
    text = "\n".join(f"[{table}]" for table in sorted(tables))
    assert read_job(config_file(tmp_path, text)) == (JobConfig(), [])


_COMMON = """
job = {{dump_folder = "./outputs", description = "a training", print_config = false}}
metrics = {{log_freq = 1, enable_tensorboard = false, save_tb_folder = "tb"}}
optimizer = {{name = "AdamW", lr = 8e-4, eps = 1e-8}}
lr_scheduler = {{warmup_steps = 2, decay_ratio = 0.8, decay_type = "linear", min_lr_factor = 0.0}}
checkpoint = {{enable = false, last_save_model_only = false, async_mode = "disabled"}}
compile = {{enable = false, components = ["model", "loss"]}}
validation = {{enable = false, dataset = "c4_validation", freq = 5, steps = 10}}
model = {{name = "{name}", flavor = "{flavor}", hf_assets_path = "./tests/assets/tokenizer"}}
training = {{local_batch_size = {rows}, seq_len = {length}, steps = 10, dataset = "c4_test"}}
activation_checkpoint = {{mode = "{mode}", selective_ac_option = "op"}}
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
filter_fqns = ["output", "router.gate"]
[quantize.grouped_mm]
float8 = {{fqns = ["experts"]}}
mx = {{fqns = ["experts"]}}
[parallelism]
data_parallel_shard_degree = -1
pipeline_parallel_schedule = "Interleaved1F1B"
"""
_SCOUT = "tensor_parallel_degree = 8\nexpert_tensor_parallel_degree = 8"


@pytest.mark.parametrize(
    ("name", "flavor", "ranks", "rows", "length", "mode", "layout"),
    [
        ("deepseek_v3", "debugmodel", 1, 8, 2048, "selective", ""),
        ("deepseek_v3", "16B", 8, 4, 4096, "selective", "expert_parallel_degree = 8"),
        ("deepseek_v3", "671B", 512, 4, 4096, "selective", ""),
        ("qwen3", "debugmodel_moe", 1, 8, 4096, "selective", ""),
        ("llama4", "17bx16e", 64, 8, 8192, "full", _SCOUT),
        ("llama4", "17bx128e", 256, 8, 8192, "full", f"{_SCOUT}\npipeline_parallel_degree = 4"),
        ("gpt_oss", "debugmodel", 1, 8, 2048, "none", ""),
    ],
)
def test_file_of_torchtitans_models_is_accepted(
    tmp_path: Path, name: str, flavor: str, ranks: int, rows: int, length: int, mode: str,
    layout: str,
) -> None:  # fmt: skip
    text = _COMMON.format(name=name, flavor=flavor, rows=rows, length=length, mode=mode)
    argv = config_file(tmp_path, text + layout)
    assert read_job(argv)[1] == []
    assert prepare(argv, ranks, {})[0].training.global_batch_size > 0
