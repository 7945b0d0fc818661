"""Whole runs in other layouts write the metrics of one process: loss, norm, validation, load."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.support.tiers import tiered
from tests.support.trainings import train_here
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.runtime.ranks import run_on_ranks

BOUND = 1e-10
MEASURED = ("loss", "grad_norm", "balance_loss", "mtp_loss", "validation_loss", "moe/", "tokens")
DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
    "schedule": "pipeline_parallel_schedule",
    "cp_method": "context_parallel_rotate_method",
}


def make_job(family: str, folder: Path, **layout: int | str) -> JobConfig:
    overrides = {
        "job.dump_folder": folder,
        "training.steps": 3,
        "training.local_batch_size": 8 if "pp" in layout else 2,
        "validation.enable": True,
        "validation.freq": 1,
        # Other shapes than in training.
        "validation.local_batch_size": 4,
        "validation.seq_len": 32,
        "validation.steps": 3,
        **{f"parallelism.{DEGREES[key]}": value for key, value in layout.items()},
    }
    argv = ["--job.config_file", f"configs/debug/gate_{family}.toml"]
    return load_job(
        [*argv, *(str(x) for pair in overrides.items() for x in (f"--{pair[0]}", pair[1]))]
    )


@cache
def metrics(family: str, world_size: int, **layout: int | str) -> list[dict[str, float]]:
    folder = Path(mkdtemp())
    run_on_ranks(train_here, world_size, make_job(family, folder, **layout))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    measured = [{k: v for k, v in json.loads(x).items() if k.startswith(MEASURED)} for x in lines]
    rates = {"tokens_per_second", "tokens_per_second_per_device"}
    return [{k: v for k, v in line.items() if k not in rates} for line in measured]


@pytest.mark.parametrize(
    "family, world_size, layout",
    tiered(
        [],
        slow=[("llama4", 4, {"pp": 2, "cp": 2, "ep": 2}), ("mixtral", 4, {"tp": 2, "ep": 4})],
        full=[
            ("deepseek_v3", 4, {"pp": 2, "tp": 2, "ep": 2}),
            ("deepseek_v3", 8, {"pp": 2, "cp": 2, "ep": 2, "schedule": "ZBVZeroBubble"}),
            ("gpt_oss", 4, {"cp": 2, "tp": 2, "etp": 2, "cp_method": "ring"}),
            ("deepseek_v3", 4, {"pp": 4, "schedule": "Interleaved1F1B"}),
            ("qwen3", 4, {"tp": 2, "cp": 2, "etp": 2, "cp_method": "ulysses"}),
            ("qwen3", 4, {"dp_replicate": 2, "cp": 2, "cp_method": "ring"}),
            ("qwen3", 2, {"pp": 2, "schedule": "DualPipeV"}),
        ],
    ),
)
def test_metrics_are_those_of_one_process(family: str, world_size: int, layout: dict):
    expected, found = metrics(family, 1), metrics(family, world_size, **layout)
    assert {"validation_loss", "moe/layers.7/entropy"} <= expected[0].keys()
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=BOUND), (step, key)
