"""The arithmetic of scripts/bench/torchtitan, and the substitutes that torchtitan gets."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch


def observed(*, first: float, step: float, memory: list[float], peak: float) -> Any:
    """A run whose steps take `step` seconds each, after a first one at `first`."""
    from scripts.bench.torchtitan.runs import Observed

    return Observed(
        seconds=[first + step * number for number in range(len(memory))],
        losses=[7.0] * len(memory),
        resident_mib=memory,
        peak_mib=peak,
        num_parameters=14_428_672,
    )


def test_figures_leave_the_first_steps_out_and_are_beyond_torch_alone() -> None:
    from scripts.bench.torchtitan.compare import figures_of
    from scripts.bench.torchtitan.runs import Start

    memory = [300.0] * 5 + [600.0, 620.0, 640.0]
    run = observed(first=7.0, step=0.5, memory=memory, peak=700.0)
    run.seconds[3] += 0.2  # One of the steps that do not count.
    figures = figures_of([run], [Start(torch=3.0, fsdp=4.5, memory_mib=200.0)])
    assert figures.tokens_per_second == pytest.approx([4096.0] * 3)
    assert (figures.first_step, figures.beyond_torch, figures.beyond_fsdp) == (7.0, 4.0, 2.5)
    assert (figures.memory_mib, figures.growth_mib) == (500.0, 40.0)
    assert figures.growth == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("dtype", "times", "ours", "last", "expected"),
    [
        ("float32", 1.16, 400.0, 305.0, [True, True, False]),
        ("float32", 1.14, 400.0, 302.0, [False, True, True]),
        ("bfloat16", 1.51, 500.0, 302.0, [True, False, True]),
        ("bfloat16", 1.49, 400.0, 302.0, [False, True, True]),
    ],
)
def test_goals(dtype: str, times: float, ours: float, last: float, expected: list[bool]) -> None:
    from scripts.bench.torchtitan import compare

    row = measured_row(f"cmp {dtype} 1 rank", times=times, ours=ours, last=last)
    goals = compare.goals(row)
    assert [goal.met for goal in goals.values()] == expected
    assert goals["tokens/s"].figure == pytest.approx(times)
    assert goals["memory"].figure == pytest.approx((ours - 200) / 410)
    assert goals["memory"].bound == 0.7  # Less than that is needed.


def test_the_memory_goal_is_never_below_what_is_needed() -> None:
    from scripts.bench.torchtitan import compare

    needed = {row.name: compare.needed_mib(row) for row in compare.all_rows()}
    # Parameters, gradients and two moments of 14,428,672 parameters, in float32.
    assert needed["cmp float32 1 rank"] == pytest.approx(14_428_672 * 16 / 2**20)
    assert needed["cmp float32 1 rank"] < needed["cmp bfloat16 1 rank"]
    experts = 8 * 3 * 256 * 512
    halved = (needed["cmp bfloat16 FSDP 2"] - needed["cmp bfloat16 FSDP 2, EP 2"]) * 2**20
    assert halved == pytest.approx(experts / 2 * 2)
    row = measured_row("cmp float32 1 rank", times=2.0, ours=400.0, last=300.0, theirs=500.0)
    share = needed["cmp float32 1 rank"] / 300
    assert compare.goals(row)["memory"] == (pytest.approx(200 / 300), pytest.approx(share), True)


def measured_row(
    name: str, *, times: float, ours: float, last: float, theirs: float = 610.0
) -> Any:
    """A row of one round, torchtitan `times` slower; peaks and our last step's memory in MiB."""
    from scripts.bench.torchtitan import compare

    row = next(row for row in compare.all_rows() if row.name == name)
    row.starts.append(compare.Start(torch=3.0, fsdp=4.5, memory_mib=200.0))
    row.ours.append(observed(first=5.5, step=1.0, memory=[300.0] * 7 + [last], peak=ours))
    row.theirs.append(observed(first=6.0, step=times, memory=[300.0] * 8, peak=theirs))
    return row


def test_the_table_of_the_docs_is_made_of_the_comparisons_figures(tmp_path: Path) -> None:
    import json

    from scripts.bench.torchtitan import compare
    from scripts.docs import beside_torchtitan

    row = measured_row("cmp float32 1 rank", times=1.2, ours=500.0, last=300.0)
    row.trainer.append(observed(first=6.0, step=2.0, memory=[300.0] * 8, peak=800.0))
    results = tmp_path / "torchtitan.json"
    compare.write(results, [row, compare.all_rows()[1]], {"float32, 1 threads": [{512: 0.1}]})
    text = beside_torchtitan.tables_of(json.loads(results.read_text()))
    assert "| cmp float32 1 rank | 1 | 2,048 : 1,707 | 1.20 (1.15) | " in text
    assert "300 : 410 | **0.73** (0.70) | 0.54 | 0 % : 0 % (2 %) |" in text
    assert "| cmp float32 1 rank | 2,048 : 1,024 | 2.00 | 300 : 600 | 0.50 |" in text


def test_a_row_whose_job_dies_is_left_out_of_that_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    from scripts.bench.measure import JobFailed
    from scripts.bench.torchtitan import compare

    def run(row: Any, *_: Any, ours_first: bool) -> None:
        if row.dtype == "bfloat16" and ours_first:
            raise JobFailed("gloo aborts")
        measured = measured_row(row.name, times=1.2, ours=500.0, last=300.0)
        for name in ("starts", "ours", "theirs"):
            getattr(row, name).extend(getattr(measured, name))

    results = tmp_path / "figures.json"
    options = ["--rows", "cmp.*FSDP 2$", "--repeats", "2", "--json", str(results)]
    monkeypatch.setattr("sys.argv", ["compare", *options, "--out", str(tmp_path)])
    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "make_environment", lambda *_: None)
    monkeypatch.setattr(compare, "write_data", lambda _: (tmp_path, tmp_path))
    monkeypatch.setattr(compare, "matmul_tflops", lambda _: {512: 0.1, 1024: 0.1, 2048: 0.1})
    assert compare.main() == 1
    rounds = {row["name"]: len(row["starts"]) for row in json.loads(results.read_text())["rows"]}
    assert rounds == {"cmp float32 FSDP 2": 2, "cmp bfloat16 FSDP 2": 1}
    assert "gloo aborts\ncmp bfloat16 FSDP 2: not in round 1" in capsys.readouterr().err


def test_a_comparison_without_a_row_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scripts.bench.torchtitan import compare

    def run(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    options = ["compare", "--rows", "cmp.*FSDP 2$", "--out", str(tmp_path), "--repeats"]
    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "make_environment", lambda *_: None)
    monkeypatch.setattr(compare, "write_data", lambda _: (tmp_path, tmp_path))
    monkeypatch.setattr(compare, "matmul_tflops", lambda _: {512: 0.1, 1024: 0.1, 2048: 0.1})
    monkeypatch.setattr("sys.argv", [*options, "1"])
    assert compare.main() == 130
    monkeypatch.setattr("sys.argv", [*options, "0"])
    with pytest.raises(SystemExit, match="2"):
        compare.main()


def test_a_program_whose_loss_is_nan_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scripts.bench.torchtitan import compare, runs

    def print_steps(*words: Any) -> None:
        for step in (1, 2):
            words[-1](f"step {step} loss nan", float(step), os.getpid())

    monkeypatch.setattr(runs, "run_job", print_steps)
    jobs = runs.Jobs(tmp_path, tmp_path / "venv", tmp_path / "data", tmp_path / "tokenizer")
    with pytest.raises(SystemExit, match="titan_moe: its loss is not finite"):
        jobs.ours(compare._MODELS[0], "float32", compare._LAYOUTS[0], 2)


def test_different_models_are_not_compared() -> None:
    from scripts.bench.torchtitan import compare

    rows = compare.all_rows()
    assert len({row.name for row in rows}) == len(rows) == 12
    for model in {row.model for row in rows}:
        assert compare.different_models(model, model.num_parameters) is None
        problem = compare.different_models(model, model.num_parameters + 1)
        assert problem and "different models" in problem
        assert compare.different_models(model, None)


def test_lines_of_both_programs_are_read_once_per_step() -> None:
    from scripts.bench.torchtitan.runs import Observed

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

    from scripts.bench.torchtitan.compare import all_rows
    from scripts.bench.torchtitan.data import EOS, VOCAB_SIZE, cut_text, write_data
    from scripts.bench.torchtitan.runs import Jobs
    from titan_moe.data.tokenizer import load_tokenizer
    from titan_moe.train import prepare

    data, tokenizer = write_data(tmp_path / "text")
    again, _ = write_data(tmp_path / "text")
    assert again == data and (data / "records.jsonl").is_file()
    loaded = load_tokenizer(str(tokenizer))
    assert (loaded.vocab_size, loaded.decode([loaded.eos_id])) == (VOCAB_SIZE, EOS)
    assert cut_text("abcdefgh", 3) == ["abc", "def", "gh"] and cut_text("abcde", 4) == ["abcd"]

    jobs = Jobs(tmp_path, tmp_path / "venv", data, tokenizer)
    for row in all_rows():
        config = tmp_path / "job.toml"
        tables = jobs.our_tables(row.model, row.dtype, row.layout, steps=20)
        config.write_text(tomli_w.dumps(tables), encoding="utf-8")
        job, _ = prepare(["--job.config_file", str(config)], row.layout.num_ranks, {})
        assert job.training.global_batch_size == 8 and not job.training.mask_documents


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


def test_a_profile_is_of_operators_own_time_on_the_thread_that_trains() -> None:
    from scripts.bench.torchtitan.operators import profile_of

    def event(name: str, begin: float, length: float, tid: int = 1, cat: str = "cpu_op") -> dict:
        return {"name": name, "ts": 1000 * begin, "dur": 1000 * length, "tid": tid, "cat": cat}

    found = profile_of(
        [
            event("ProfilerStep#3", 10, 10, cat="user_annotation"),
            event("ProfilerStep#4", 20, 10, cat="user_annotation"),
            event("aten::mm", 5, 4),  # Before the steps.
            event("aten::linear", 11, 6),
            event("aten::mm", 12, 4),
            event("aten::mm", 21, 2),
            event("gloo:all_reduce", 12, 6, tid=7, cat="user_annotation"),
            event("aten::add_", 12, 6, tid=7),
        ]
    )
    assert found.wall == 10
    assert found.own == {"aten::linear": 1.0, "aten::mm": 3.0, "between operators": 6.0}
    assert found.calls == {"aten::linear": 0, "aten::mm": 1}
    assert found.collectives == {"gloo:all_reduce": 3.0}


def test_the_trainers_job_names_the_same_model(tmp_path: Path) -> None:
    import json

    from scripts.bench.torchtitan import compare, runs

    seen: list[tuple[str, list[str], int]] = []

    class Noted(runs.Jobs):
        def _observe(self, program: str, job: Sequence[str], steps: int) -> runs.Observed:
            seen.append((program, list(job), steps))
            return runs.Observed()

    for model in compare._MODELS:
        jobs = Noted(tmp_path, tmp_path / "venv", tmp_path / "data", tmp_path / "tokenizer")
        jobs.trainer(model, "bfloat16", 9)
        program, (python, _, job), steps = seen.pop()
        assert (program, steps) == ("transformers", 9)
        assert python == str(tmp_path / "venv-transformers/bin/python")
        found = json.loads(Path(job).read_text())
        assert found["batch_size"] * found["seq_len"] == 2048 and found["dtype"] == "bfloat16"
        config = json.loads(Path(found["model"]).read_text())
        assert config["num_hidden_layers"] == compare._config(model).num_layers
    assert [row.layout.num_ranks for row in compare.all_rows() if row.has_trainer] == [1] * 4
