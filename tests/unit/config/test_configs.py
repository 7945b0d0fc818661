"""Every TOML of the repository, and the schema that editors check it with."""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from titan_moe.cli.config import SCHEMA
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.parallelize.communicators import NODE
from titan_moe.parallelize.memory import GIB, MARGIN, memory
from titan_moe.parallelize.policies import make_plan
from titan_moe.prepare.job import prepare

_SCHEMA = Path(__file__).parents[3] / SCHEMA
_CONFIGS = _SCHEMA.parent
_SUITES = _CONFIGS / "suites"
_H100 = 79 * GIB


def test_the_schema_is_current() -> None:
    made = JobConfig.model_json_schema()
    assert json.loads(_SCHEMA.read_text()) == made, "titan-moe config schema"


def each(paths: Iterable[Path]) -> pytest.MarkDecorator:
    """Runs a test for each of these files."""
    return pytest.mark.parametrize(
        "path", sorted(paths), ids=lambda path: str(path.relative_to(_CONFIGS))
    )


@each(path for path in _CONFIGS.rglob("*.toml") if path.parent != _SUITES)
def test_a_config_names_the_schema_and_runs_on_the_ranks_and_in_the_memory_that_it_states(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = path.read_text()
    named = re.match(r"#:schema (\S+)\n", text)
    assert named and (path.parent / named[1]).resolve() == _SCHEMA
    # A file for any machine states no number and starts on run_train.sh's two CPU processes.
    stated = re.search(r"^# ranks: (\d+)$", text, re.MULTILINE)
    ranks = int(stated[1]) if stated else 2
    if stated:
        monkeypatch.setattr("titan_moe.prepare.job.count_gpus", lambda environment: 8)
    job, config, _ = prepare(["--job.config_file", str(path)], ranks, os.environ)
    if stated:
        plan = make_plan(
            job, config, ranks, device_type="cuda", device_bytes=_H100, ranks_per_node=NODE
        )
        found = memory(plan)
        comment = " ".join(line.removeprefix("# ") for line in text.splitlines())
        assert f"{found}; {found.needed / GIB:.1f} of 79.0 at most" in comment
        assert found.needed <= _H100 - MARGIN
        # A node of 8 has 2 TB.
        assert 8 * found.host < 1.9e12


@each(_CONFIGS.glob("*/sft_*_*gpu.toml"))
def test_a_config_that_fine_tunes_starts_from_the_folder_that_holds_the_chat_template(
    path: Path,
) -> None:
    job = load_job(["--config", str(path)])
    assert job.training.dataset_format == "messages" and job.checkpoint.initial_load_in_hf
    assert job.model.tokenizer_path == job.model.hf_assets_path is not None
    pretraining = load_job(["--config", str(path.with_name(path.name.removeprefix("sft_")))])
    assert job.parallelism == pretraining.parallelism
    assert job.optimizer.lr < pretraining.optimizer.lr / 10


_PRETRAINING = [p for p in _CONFIGS.glob("*/*_*gpu.toml") if not p.name.startswith("sft_")]


@each(path for path in _PRETRAINING if path.parent.name != "bench")
def test_a_config_for_gpus_names_the_command_that_makes_its_data(path: Path) -> None:
    job = load_job(["--config", str(path)])
    (line,) = re.findall(r"^# titan-moe tokenize --out (.+)$", path.read_text(), re.MULTILINE)
    folder, *overrides = line.split()
    made = load_job(overrides)
    assert job.training.dataset == "tokens"
    assert Path(job.training.dataset_path or "") == Path(folder)
    assert Path(job.model.tokenizer_path) == Path(made.model.tokenizer_path)
    assert made.training.dataset == "c4" and made.training.dataset_path is None


_ON_A_LAPTOP = """
--checkpoint.initial_load_in_hf=false --checkpoint.last_save_in_hf=false
--training.dataset stdlib --model.tokenizer_path bytes --training.seq_len 64 --training.steps 4
--training.local_batch_size 2 --training.global_batch_size -1
--parallelism.expert_parallel_degree 1 --parallelism.tensor_parallel_degree 1
--parallelism.pipeline_parallel_degree 1 --parallelism.context_parallel_degree 1
--parallelism.expert_tensor_parallel_degree 1
"""
# A cluster's file may have these.
_OF_CLUSTERS = """
--training.enable_cpu_offload --parallelism.enable_async_tensor_parallel
--parallelism.expert_parallel_comm_backend symmetric --parallelism.expert_parallel_overlap
--parallelism.expert_parallel_capacity_factor 1.5 --profiling.enable_memory_snapshot
--model.converters quantize.linear.float8
--training.text_column body --compile.enable
"""


@each(_CONFIGS.glob("*/*_*gpu.toml"))
def test_config_for_gpus_starts_small_on_a_cpu(path: Path) -> None:
    words = ["--model.flavor", "debugmodel", *_ON_A_LAPTOP.split(), *_OF_CLUSTERS.split()]
    prepare(["--config", str(path), *words], 2, {"CUDA_VISIBLE_DEVICES": ""})
