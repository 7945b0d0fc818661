"""The arithmetic of the benchmark scripts, and that what they name exists."""

import json
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


def test_what_a_step_costs_is_told_by_part_and_kind() -> None:
    from scripts.bench import loop_overhead as bench

    ranks = [
        {
            "seconds": {bench.ALONE: 0.006, **dict.fromkeys(bench.KINDS, seconds)},
            "counts": {bench.ALONE: (100, 2), **dict.fromkeys(bench.KINDS, (130, 3))},
            "updates": {"torch.optim.AdamW": seconds, "AdamW": 0.002},
        }
        for seconds in (0.007, 0.008)
    ]
    found = bench.slowest(ranks)
    assert found["updates"] == {"torch.optim.AdamW": 0.008, "AdamW": 0.002}
    name, milliseconds, beyond, *rest = bench.rows(found)[0]
    assert (name, milliseconds, beyond) == ("not logged", 8.0, pytest.approx(2.0))
    assert rest == ["25.0%", 30, 1]


def test_both_commands_are_told_beyond_torchs_own_start() -> None:
    from scripts.bench.torchtitan import startup

    job, script = "torchrun -m titan_moe train", "./run_train.sh"
    round_ = {"torch and gloo": 2.0, "and FSDP2": 3.0, job: 4.0, script: 5.0}
    assert startup.beyond([round_, round_]) == {job: [1.0, 1.0], script: [2.0, 2.0]}


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("training", ["--rows", "no such model"]),
        ("torchtitan.compare", ["--rows", "no such model"]),
        ("torchtitan.startup", ["--repeats", "many"]),
    ],
)
def test_a_pattern_or_option_that_fits_nothing_is_refused(script: str, options: list[str]) -> None:
    command = [sys.executable, "-m", f"scripts.bench.{script}", *options]
    refused = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert refused.returncode == 2
    assert options[1] in refused.stderr


def test_dispatchers_are_summed_over_ranks_and_timed_by_the_slowest() -> None:
    from scripts.bench import dispatch

    ranks = [
        dispatch.Seen(120.0, 60.0, 100, 50, 0.0, [1.0, 3.0, 2.0]),
        dispatch.Seen(90.0, 50.0, 50, 50, 0.5, [2.0, 1.0, 1.0]),
    ]
    row = dispatch.summary(ranks)
    assert row["bytes_over_fewest"] == 1.4 and row["between_over_fewest"] == 1.1
    assert row["ms"] == 2000.0 and row["dropped"] == 0.25


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


def test_compiled_layers_are_told_beside_eager_ones() -> None:
    from scripts.bench import compile as script
    from titan_moe.distributed.compile import Compiled

    row = script.Row("m", "float32", 2.0, 1.0, 9.0, Compiled(graphs=7, breaks=1, seconds=5.0))
    assert row.cells()[2:] == ["2.000", "1.000", "2.00x", "9.0", "5.0", "7"]
    assert len(row.cells()) == len(script._COLUMNS)


@pytest.mark.slow
def test_what_a_rank_pays_to_be_found_is_counted_and_timed(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "scripts.bench.hang_watch", "--layers", "2", "--repeats", "1"]
    subprocess.run([*command, "--json", figures], cwd=REPO, capture_output=True, check=False)
    found = json.loads(figures.read_text())
    # At the least an exchange of rows there and back in both layers, forward and backward.
    assert found["step"]["entries"] >= 8
    assert found["step"]["notes"] >= 8
    assert set(found["calls"]) == {"on", "off"}


@pytest.mark.slow
def test_a_run_that_is_signalled_stops_saved() -> None:
    from scripts.bench.stop_time import stop_once

    found = stop_once(ranks=2, mode="async", delay=0.0)
    assert 0 < found["step"] < found["stop"]
    assert found["save"] > 0
