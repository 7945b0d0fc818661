"""The arithmetic of scripts/bench/torchtitan, and the substitutes that torchtitan gets."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch


def row_of(name: str, ours: Any, theirs: Any, trainer: Any = None) -> Any:
    """A row of one round."""
    from scripts.bench.torchtitan import compare

    row = next(row for row in compare.all_rows() if row.name == name)
    row.runs = {"titan_moe": [ours], "torchtitan": [theirs]}
    if "Trainer" in row.programs:
        row.runs["Trainer"] = [trainer or theirs]
    return row


def observed(*, step: float, last: float, peak: float) -> Any:
    """A run of 8 steps of `step` seconds each; memory in MiB, the last step's and the highest."""
    from scripts.bench.torchtitan.jobs import Observed

    return Observed(
        seconds=[7.0 + step * number for number in range(8)],
        losses=[7.0] * 8,
        resident_mib=[300.0] * 7 + [last],
        peak_mib=peak,
        num_parameters=14_428_672,
    )


@pytest.mark.parametrize(
    ("dtype", "times", "peak", "last", "met"),
    [
        ("float32", 1.16, 400.0, 305.0, [True, True, True, False]),
        ("float32", 1.14, 400.0, 302.0, [False, False, True, True]),
        ("bfloat16", 1.51, 500.0, 302.0, [True, True, False, True]),
        ("bfloat16", 1.49, 400.0, 302.0, [False, False, True, True]),
    ],
)
def test_goals(dtype: str, times: float, peak: float, last: float, met: list[bool]) -> None:
    from scripts.bench.torchtitan import compare

    ours = observed(step=1.0, last=last, peak=peak)
    ours.seconds[3] += 0.2  # One of the steps that do not count.
    theirs = observed(step=times, last=300.0, peak=610.0)
    row = row_of(f"cmp {dtype} 1 rank", ours, theirs)
    goals = compare.goals(row, bare_mib=200.0)
    assert [goal.met for goal in goals.values()] == met
    assert goals["tokens/s over torchtitan"].figure == pytest.approx(times)
    assert goals["memory"][:2] == (pytest.approx((peak - 200) / 410), 0.7)
    assert goals["growth"].figure == pytest.approx((last - 300) / 100)
    figures = compare.figures_of(row, "titan_moe", 200.0)
    assert (figures["tokens/s"], figures["first step"]) == (pytest.approx(2048.0), 7.0)


def test_needed_mib_is_a_memory_goal_that_cannot_be_beaten() -> None:
    from scripts.bench.torchtitan import compare

    needed = {row.name: compare.needed_mib(row) for row in compare.all_rows()}
    # Parameters, gradients and two moments of 14,428,672 parameters, in float32.
    assert needed["cmp float32 1 rank"] == pytest.approx(14_428_672 * 16 / 2**20)
    experts = 8 * 3 * 256 * 512
    halved = (needed["cmp bfloat16 FSDP 2"] - needed["cmp bfloat16 FSDP 2, EP 2"]) * 2**20
    assert halved == pytest.approx(experts / 2 * 2)


def test_a_row_whose_job_dies_is_left_out_of_that_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from scripts.bench.measure import JobFailed
    from scripts.bench.torchtitan import compare

    def run_round(row: Any, order: Sequence[str], *_: Any) -> None:
        if row.dtype == "bfloat16" and order[0] == "titan_moe":
            raise JobFailed("gloo aborts")
        for program in order:
            run = observed(step=1.0, last=300.0, peak=500.0)
            row.runs.setdefault(program, []).append(run)

    results = tmp_path / "figures.json"
    options = ["--rows", "cmp.*FSDP 2$", "--repeats", "2", "--json", str(results)]
    monkeypatch.setattr("sys.argv", ["compare", *options, "--out", str(tmp_path)])
    monkeypatch.setattr(compare, "run_round", run_round)
    monkeypatch.setattr(compare.Jobs, "prepare", lambda *_, **__: None)
    assert compare.main() == 1
    rows = json.loads(results.read_text())["rows"]
    rounds = {row["name"]: len(row["runs"]["titan_moe"]) for row in rows}
    assert rounds == {"cmp float32 FSDP 2": 2, "cmp bfloat16 FSDP 2": 1}
    assert "gloo aborts\ncmp bfloat16 FSDP 2: not in round 1" in capsys.readouterr().err


def test_a_program_whose_loss_is_nan_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.bench.torchtitan import jobs

    def print_steps(*words: Any) -> None:
        for step in (1, 2):
            words[-1](f"step {step} loss nan", float(step), os.getpid())

    monkeypatch.setattr(jobs, "run_job", print_steps)
    with pytest.raises(SystemExit, match="titan_moe: its loss is not finite"):
        jobs.observe("titan_moe", [], 2, {})


def test_different_models_are_not_compared() -> None:
    from scripts.bench.torchtitan import compare

    for model in {row.model for row in compare.all_rows()}:
        assert compare.different_models(model, [model.num_parameters] * 2) is None
        problem = compare.different_models(model, [model.num_parameters + 1])
        assert problem and "expected" in problem
        assert compare.different_models(model, [None])


def test_lines_of_both_programs_are_read_once_per_step() -> None:
    from scripts.bench.torchtitan.jobs import Observed

    run = Observed()
    ranks = [{"VmRSS": 10.0, "VmHWM": 30.0}, {"VmRSS": 20.0, "VmHWM": 25.0}]
    lines = [
        "[titan] root - INFO - Model qwen3 peer size: 14,428,672 total parameters",
        "[titan] root - INFO - step:  1  loss:  8.13201  grad_norm:  1.0",
        "[titan] root - INFO - step:  1  loss:  8.13201  grad_norm:  1.0",  # Another rank.
        "13:46:43 step  2/10  loss  7.69075  grad norm   3.7756  lr 4.00e-04",
    ]
    for second, line in enumerate(lines):
        run.read(line, float(second), lambda: ranks)
    assert run.num_parameters == 14_428_672
    assert (run.seconds, run.losses) == ([1.0, 3.0], [8.13201, 7.69075])
    assert (run.resident_mib, run.peak_mib) == ([20.0, 20.0], 30.0)
    run.read("13:46:44 step  3/10  loss  7.0", 4.0, list)  # The ranks have ended already.
    assert (run.resident_mib[-1], run.peak_mib) == (20.0, 30.0)


def test_memory_of_this_process_and_of_its_children() -> None:
    from scripts.bench.resident import ranks_memory, read_status, resident_mib

    assert read_status("Name:\tx: y\nVmHWM:\t 2048 kB\nVmRSS:\t 1024 kB\n") == {
        "VmRSS": 1.0,
        "VmHWM": 2.0,
    }
    own = resident_mib(os.getpid())
    assert 0 < own["VmRSS"] <= own["VmHWM"]
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    try:
        started = resident_mib(child.pid)
        assert started["VmRSS"] > 1 and started in ranks_memory(os.getpid())
    finally:
        child.kill()
        child.communicate()
    assert started not in ranks_memory(os.getpid())


def test_every_row_of_ours_is_a_configuration_that_runs(tmp_path: Path) -> None:
    import tomli_w

    from scripts.bench.torchtitan.jobs import EOS, VOCAB_SIZE, Jobs, all_rows, write_data
    from titan_moe.data.tokenizer import load_tokenizer
    from titan_moe.train import prepare

    data, tokenizer = tmp_path / "text/data", tmp_path / "text/tokenizer"
    write_data(data, tokenizer)
    assert len((data / "records.jsonl").read_text().splitlines()) == 1000
    loaded = load_tokenizer(str(tokenizer))
    assert (loaded.vocab_size, loaded.decode([loaded.eos_id])) == (VOCAB_SIZE, EOS)
    jobs = Jobs(tmp_path, tmp_path / "venv")
    for row in all_rows():
        config = tmp_path / "job.toml"
        config.write_text(tomli_w.dumps(jobs.tables("titan_moe", row, 20)), encoding="utf-8")
        job, _ = prepare(["--job.config_file", str(config)], row.layout.num_ranks, {})
        assert job.training.global_batch_size == 8 and not job.training.mask_documents
        settings = json.loads(
            (jobs._trainer_job(row, 9, tmp_path).parent / "config.json").read_text()
        )
        assert settings["num_hidden_layers"] == row.model.config.num_layers


@pytest.mark.parametrize(("ranks", "experts"), [(1, 4), (2, 3)])
def test_the_substitute_for_tritons_kernel_finds_every_row(ranks: int, experts: int) -> None:
    from scripts.bench.torchtitan.torchtitan_rank import fill_indices

    counts = torch.tensor([[3, 0, 2, 1], [1, 2, 5, 4]])[:ranks, :experts].contiguous()
    starts = counts.flatten().cumsum(0) - counts.flatten()
    padded = (counts.sum(0) + 7) // 8 * 8
    offsets = padded.cumsum(0) - padded
    size = int(padded.sum()) + 8
    found = fill_indices(
        counts.flatten(), starts, offsets, experts, ranks, size, block_size=128
    ).tolist()
    # Slow oracle: rows as they arrive, each with its expert, sorted by expert.
    arrived = [e for r in range(ranks) for e in range(experts) for _ in range(int(counts[r, e]))]
    for expert in range(experts):
        rows = [row for row, its in enumerate(arrived) if its == expert]
        begin = int(offsets[expert])
        space = int(padded[expert])
        assert found[begin : begin + space] == rows + [-1] * (space - len(rows))
    assert found[int(padded.sum()) :] == [-1] * 8
