"""Cards of benchmarks, and the table of published figures."""

import json
from pathlib import Path

import pytest

from tests.support.commands import run_command, start_command
from titan_moe.config.parse import load_job, save_job
from titan_moe.models.hf import model_of_job
from titan_moe.training.run_log import model_flops_per_token
from titan_moe.verify.report.bench import rows

_ROWS = {f"{row['config'].removeprefix('bench/')} {row['routing']}": row for row in rows()}


def _folder(path: Path, *overrides: str, ranks: int = 16, device: str = "NVIDIA H100") -> Path:
    """Writes what a run of the file for 16 GPUs would leave."""
    path.mkdir()
    save_job(load_job(["--config", "bench/qwen3_30B-A3B_16gpu", *overrides]), path / "config.toml")
    facts = {"world_size": ranks, "device": device, "torch": "2.13.0", "layout": {"ep": 16}}
    facts["code"] = {"commit": "abc1234", "changed": True}
    (path / "run.json").write_text(json.dumps(facts))
    rates = {1: 1.0, 2: 2.0, 3: 9_109.0, 4: 9_109.0}
    lines = [
        {"step": step, "data": 7, "tokens_per_second": 16 * rate, "memory/peak_gib": 60.0}
        | {"tokens_per_second_per_device": rate, "tflops_per_device": 210.0, "mfu": 0.21}
        for step, rate in rates.items()
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_card_sets_runs_beside_the_published_rows_of_their_routing(tmp_path: Path):
    keys = ["--debug.moe_force_load_balance", "false", "--training.steps", "20"]
    runs = [
        _folder(tmp_path / "forced"),
        _folder(tmp_path / "natural", *keys),
        _folder(tmp_path / "smaller", ranks=4),
        _folder(tmp_path / "elsewhere", device="cpu"),
    ]
    done = run_command("report", "bench", *runs, "--json")
    assert done.returncode == 0, done.stderr
    forced, natural, smaller, elsewhere = json.loads(done.stdout).values()
    assert forced["published"] == "13,011 tokens/s on 16 H100 (Megatron-Bridge)"
    assert forced["of published"] == 9_109 / 13_011 and forced["steps"] == "3 to 4"
    assert natural["of published"] == 9_109 / 8_655 and natural["commit"] == "abc1234, changed"
    command = "titan-moe train --ranks 16 --config bench/qwen3_30B-A3B_16gpu"
    # The keys that differ from the shipped file's.
    assert (forced["command"], natural["command"]) == (command, " ".join([command, *keys]))
    assert smaller["published"] == "no published row" and smaller["of published"] is None
    assert elsewhere["published"] == forced["published"] and elsewhere["of published"] is None
    page = (tmp_path / "forced" / "card.md").read_text()
    assert "| routing | forced | natural | forced | forced |" in page and forced["command"] in page


def test_card_of_a_run_on_a_cpu(tmp_path: Path):
    keys = "--training.steps 2 --training.seq_len 32 --training.dataset synthetic "
    keys += "--metrics.log_freq 1 --model.tokenizer_path bytes --job.dump_folder"
    words = ["train", "--one-process", "--config", "qwen3/debugmodel_moe", *keys.split()]
    trained = start_command(*words, tmp_path / "run")
    output, _ = trained.communicate()
    assert trained.returncode == 0, output
    done = run_command("report", "bench", tmp_path / "run", "--out", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout).values()
    assert found["routing"] == "natural" and found["MFU"] is None and found["GiB"] > 0
    assert found["device"] == "1 x cpu" and found["tokens/s per device"] > 0
    assert found["attention counted"] == "causal, across documents though they are masked"
    assert "| published | no published row |" in (tmp_path / "card.md").read_text()


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("metrics.jsonl", "a: there is no metrics.jsonl"),
        ("run.json", "a: there is no run.json"),
    ],
)
def test_card_of_an_incomplete_run_is_a_line(tmp_path: Path, missing: str, line: str):
    folder = _folder(tmp_path / "a")
    (folder / missing).unlink()
    failed = run_command("report", "bench", folder)
    assert failed.returncode == 2 and failed.stderr == f"error: {tmp_path}/{line}\n"


@pytest.mark.parametrize("row", _ROWS.values(), ids=_ROWS)
def test_file_of_a_published_row_is_alike(row: dict):
    job = load_job(["--config", row["config"]])
    assert not job.training.mask_documents and job.training.seq_len == 4096
    if "tflops" in row:  # Rounded to a whole number. FLOPs of a token, counted alike.
        ours = model_flops_per_token(model_of_job(job.model), 4096)
        theirs = row["tflops"] * 1e12 / row["tokens_per_second"]
        least = 0.9 if job.model.name == "gpt_oss" else 0.99  # Of which others count fewer.
        assert least < theirs / ours <= 1.001
