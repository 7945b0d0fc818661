"""A few steps of every family on CUDA in bfloat16, twice with the same bits."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import TINY
from tests.support.paths import REPO
from titan_moe.metrics.jsonl import read_json_lines


def _train(folder: Path, name: str, flavor: str, **others: object) -> list[tuple[float, float]]:
    keys = {
        **TINY,
        "job.dump_folder": folder,
        "model.name": name,
        "model.flavor": flavor,
        "training.seq_len": 256,
        "training.local_batch_size": 8,
        "training.steps": 5,
        "training.mixed_precision_param": "bfloat16",
        "moe.row_alignment": 16,
        "debug.deterministic": "true",
        **{key.replace("__", "."): value for key, value in others.items()},
    }
    arguments = [f"--{key}={value}" for key, value in keys.items()]
    subprocess.run(
        [sys.executable, "-m", "titan_moe", "train", "--one-process", *arguments],
        cwd=REPO,
        check=True,
    )
    lines = read_json_lines(folder / "metrics.jsonl")
    return [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.parametrize(
    "name, flavor",
    [
        ("deepseek_v3", "debugmodel"),
        ("deepseek_v3", "gate"),  # With multi-token prediction.
        ("glm4_moe", "debugmodel"),
        ("gpt_oss", "debugmodel"),
        ("llama4", "debugmodel"),
        ("minimax_m2", "debugmodel"),
        ("mixtral", "debugmodel"),
        ("qwen3", "debugmodel"),
        ("qwen3", "debugmodel_moe"),
    ],
)
def test_a_repeat_of_a_deterministic_run_has_the_same_bits(tmp_path: Path, name: str, flavor: str):
    first = _train(tmp_path / "a", name, flavor)
    assert first[-1][0] < first[0][0]
    assert _train(tmp_path / "b", name, flavor) == first


def test_adapters_of_experts_train_and_repeat(tmp_path: Path):
    model = "qwen3", "debugmodel_moe"
    first = _train(tmp_path / "a", *model, lora__rank=8)
    assert first[-1][0] < first[0][0]
    assert _train(tmp_path / "b", *model, lora__rank=8) == first
