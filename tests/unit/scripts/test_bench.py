"""The benchmark scripts run, and compare only what can be compared."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch

from scripts.bench import gpu_permute
from scripts.bench.measure import Goal
from scripts.bench.torchtitan import compare, jobs
from scripts.bench.torchtitan.torchtitan_rank import fill_indices
from tests.support.paths import REPO
from tests.support.refusals import config_file
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.prepare.job import prepare


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["gpu_moe", "gpu_permute", "gpu_slice"])
def test_gpu_benchmark_refuses_a_machine_without_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=r"^no CUDA device here: --device cpu .*$"):
        import_module(f"scripts.bench.{name}").main()


@pytest.mark.parametrize(
    "words",
    [
        "gpu_moe --repeats 1",
        "gpu_permute --repeats 1",
        pytest.param("gpu_slice --repeats 1 --rows 1 --only deepseek_v3", marks=pytest.mark.slow),
    ],
)
def test_gpu_benchmark_runs_toy_sizes_on_a_cpu(tmp_path: Path, words: str) -> None:
    name, *options = words.split()
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"scripts.bench.{name}", "--device", "cpu", *options]
    environment = os.environ | {"PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*command, "--json", str(file)], cwd=REPO, env=environment, check=True)
    figures = json.loads(file.read_text())
    assert figures["toy"] and figures["rows"] and figures["goals"]
    assert not [row for row in figures["rows"] if "failed" in row]


def test_gpu_benchmark_that_ends_early_has_written_the_rows_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second row never comes."""
    row, file = gpu_permute.measure(gpu_permute.TOY_CASES[0], 1e9, 1, "cpu"), tmp_path / "rows.json"
    measured = iter([row])
    monkeypatch.setattr(gpu_permute, "measure", lambda *_: next(measured))
    monkeypatch.setattr(gpu_permute, "TOY_CASES", gpu_permute.TOY_CASES * 2)
    with pytest.raises(StopIteration):
        gpu_permute.main(["--device", "cpu", "--repeats", "1", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures["rows"] == [row] and len(figures["goals"]) == 2


def test_goal_that_was_not_measured_is_missed() -> None:
    for at_most in (True, False):
        assert not Goal("MFU", float("nan"), 0.45, at_most=at_most).met


def test_rows_of_torchtitan_are_configurations_that_run(tmp_path: Path) -> None:
    data, tokenizer = tmp_path / "text/data", tmp_path / "text/tokenizer"
    jobs.write_data(data, tokenizer)
    assert len((data / "records.jsonl").read_text().splitlines()) == 1000
    loaded = load_tokenizer(str(tokenizer))
    assert (loaded.vocab_size, loaded.decode([loaded.eos_id])) == (jobs.VOCAB_SIZE, jobs.EOS)
    for row in compare.all_rows():
        tables = jobs.Jobs(tmp_path, tmp_path / "venv").tables("titan_moe", row, 20)
        words = config_file(tmp_path, tomli_w.dumps(tables))
        job, _, _ = prepare(words, row.layout.num_ranks, {})
        assert job.training.global_batch_size == 8


def observed(*, step: float, last: float, peak: float) -> jobs.Observed:
    """Returns a run of 8 steps of `step` seconds; memory in MiB, the last step's and the peak."""
    return jobs.Observed(
        seconds=[7.0 + step * number for number in range(8)],
        losses=[7.0] * 8,
        resident_mib=[300.0] * 7 + [last],
        peak_mib=peak,
        num_parameters=14_428_672,
    )


@pytest.mark.parametrize(
    ("dtype", "times", "peak", "last", "met"),
    [
        ("float32", 1.16, 400.0, 305.0, [True, True, False]),
        ("float32", 1.14, 400.0, 302.0, [False, True, True]),
        ("bfloat16", 1.51, 500.0, 302.0, [True, False, True]),
    ],
)
def test_goals_beside_torchtitan(
    dtype: str, times: float, peak: float, last: float, met: list[bool]
) -> None:
    row = next(row for row in compare.all_rows() if row.name == f"cmp {dtype} 1 rank")
    ours = observed(step=1.0, last=last, peak=peak)
    ours.seconds[3] += 0.2  # One of the steps that do not count.
    theirs = observed(step=times, last=300.0, peak=610.0)
    row.runs = {"titan_moe": [ours], "torchtitan": [theirs]}
    goals = compare.goals(row, bare_mib=200.0)
    assert [goal.met for goal in goals] == met
    wanted = [times, (peak - 200) / 410, (last - 300) / 100]
    assert [goal.value for goal in goals] == pytest.approx(wanted)


def test_program_whose_loss_is_nan_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def print_steps(*words: Any) -> None:
        for step in (1, 2):
            words[-1](f"step {step} loss nan", float(step), os.getpid())

    monkeypatch.setattr(jobs, "run_job", print_steps)
    with pytest.raises(SystemExit, match="titan_moe: its loss is not finite"):
        jobs.observe("titan_moe", [], 2, {})


def test_different_models_are_not_compared() -> None:
    for model in {row.model for row in compare.all_rows()}:
        assert compare.different_models(model, model.num_parameters) is None
        for other in (model.num_parameters + 1, None):
            problem = compare.different_models(model, other)
            assert problem and "expected" in problem


def test_round_compares_programs_of_which_torchtitan_alone_prints_its_parameters() -> None:
    row, steps = compare.all_rows()[0], 12
    theirs = jobs.Observed(num_parameters=row.model.num_parameters)
    seen = {"titan_moe": jobs.Observed(), "torchtitan": theirs}
    runner = SimpleNamespace(run=lambda program, row, steps: seen[program])
    compare.run_round(row, jobs.PROGRAMS, runner, steps)
    assert row.runs == {program: [run] for program, run in seen.items()}


def test_lines_of_both_programs_are_read_once_per_step() -> None:
    run = jobs.Observed()
    ranks = [{"VmRSS": 10.0, "VmHWM": 30.0}, {"VmRSS": 20.0, "VmHWM": 25.0}]
    lines = [
        "[titan] root - INFO - Model qwen3 peer size: 14,428,672 total parameters",
        "[titan] root - INFO - step:  1  loss:  8.13201  grad_norm:  1.0",
        "[titan] root - INFO - step:  1  loss:  8.13201  grad_norm:  1.0",  # Another rank.
        "13:46:43 step  2/10  loss  7.69075  grad norm   3.7756  lr 4.00e-04",
    ]
    for second, line in enumerate(lines):
        run.read(line, float(second), lambda: ranks)
    run.read("13:46:44 step  3/10  loss  7.0", 4.0, list)  # The ranks have ended already.
    assert run.num_parameters == 14_428_672
    assert (run.seconds, run.losses) == ([1.0, 3.0, 4.0], [8.13201, 7.69075, 7.0])
    assert (run.resident_mib, run.peak_mib) == ([20.0] * 3, 30.0)


def test_fill_indices_finds_every_row() -> None:
    counts = torch.tensor([[3, 0, 2], [1, 2, 5]])  # Rows that arrive, by rank and expert.
    starts = counts.flatten().cumsum(0) - counts.flatten()
    padded = (counts.sum(0) + 7) // 8 * 8
    offsets = padded.cumsum(0) - padded
    found = fill_indices(counts.flatten(), starts, offsets, 3, 2, 32, block_size=128).tolist()
    expected = [[0, 1, 2, 5], [6, 7], [3, 4, 8, 9, 10, 11, 12], []]
    assert found == [row for rows in expected for row in rows + [-1] * (8 - len(rows))]
