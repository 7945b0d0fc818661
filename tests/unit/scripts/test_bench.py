"""The arithmetic of the benchmark scripts, and that what they name exists."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO


def test_a_row_leaves_the_first_steps_out_and_counts_all_ranks() -> None:
    from scripts.bench import training

    row = training.Row("deepseek_v3/2M", "float32", "FSDP 2", 2, 1)
    speeds = [1.0] * 5 + [100.0, 300.0, 200.0]
    lines = [
        {"tokens_per_second": speed, "tflops_per_device": speed / 1e4, "memory/peak_gib": 0.5 + i}
        for i, speed in enumerate(speeds)
    ]
    row.add(lines)
    cells = row.cells(matmul_tflops=0.08)
    assert cells[3:] == ["200", "100-300", "7.50", "40.0", "50%"]


def test_every_row_is_a_configuration_that_runs(tmp_path: Path) -> None:
    import tomli_w

    from scripts.bench import training
    from titan_moe.train import prepare

    rows = training.all_rows()
    assert len({row.name for row in rows}) == len(rows) == 24
    for row in rows:
        config = tmp_path / "bench.toml"
        config.write_text(tomli_w.dumps(training.job_tables(row, 6, str(tmp_path))))
        job, _ = prepare(["--job.config_file", str(config)], row.num_ranks, {})
        assert job.training.global_batch_size == 8


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("training", ["--rows", "no such model"]),
        ("torchtitan.compare", ["--rows", "no such model"]),
    ],
)
def test_a_pattern_or_option_that_fits_nothing_is_refused(script: str, options: list[str]) -> None:
    command = [sys.executable, "-m", f"scripts.bench.{script}", *options]
    refused = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert refused.returncode == 2
    assert options[1] in refused.stderr


def test_the_most_memory_that_a_step_has_alive_at_once_is_counted() -> None:
    import torch

    from scripts.bench import memory

    mib = 2**20
    kept = []

    def step() -> None:
        first = torch.empty(3 * mib, dtype=torch.uint8)
        second = torch.empty(2 * mib, dtype=torch.uint8)
        del first
        kept.append(torch.empty(2 * mib, dtype=torch.uint8))
        del second

    beyond = memory._allocated_beyond(step, torch.device("cpu"))
    assert 5 * mib <= beyond < 5.1 * mib
    way = memory.Way("none", {"mode": "none"}, 0, held=7.0, beyond=beyond)
    assert way.peak == 7 + beyond
