"""`titan-moe plan`: layouts that fit, files that the checks accept, mistakes in one line."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from titan_moe.cli import plan_here
from titan_moe.cli.main import main
from titan_moe.runtime.gpus import GPUS

_JOB = ["--model", "deepseek_v3/debugmodel", "--seq-len", "256", "--global-batch", "16"]


def test_layouts_are_printed_and_their_files_pass_the_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "--gpus", "4", *_JOB, "--keep", "2", "--out", str(tmp_path)]
    assert main([*argv, "--load", "zipf:1", "--optimizer.lr", "1e-3"]) == 0
    text = capsys.readouterr().out
    assert "deepseek_v3 debugmodel on 4 x H100 of 79.0 GiB, 1 node: 16 x 256 tokens" in text
    assert "bound by" in text and "the first one's step: " in text
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page and "tokens/s/GPU" in page
    for name in ("1.toml", "2.toml"):
        file = str(tmp_path / name)
        assert "lr = 0.001" in Path(file).read_text()
        assert main(["check", "--config", file, "--ranks", "4"]) == 0
        assert main(["memory", "--config", file, "--ranks", "4"]) == 0


def test_what_does_not_fit_says_by_how_much_and_what_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["plan", "--gpus", "2", "--model", "qwen3/30B-A3B", "--global-batch", "64"]
    assert main([*argv, "--gpu-gib", "70"]) == 1
    text = capsys.readouterr().out
    assert "do not fit, even with full recomputation:" in text and "GiB over: GiB stored" in text
    assert "nothing fits 2 GPUs: --gpus 8 is enough" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--gpu h1000", "--gpu h1000: choose a100, "),
        ("--model nothing", "--model nothing: neither FAMILY/FLAVOR"),
        ("--load hot", "--load hot: choose balanced, "),
        ("--gpus 9000", "--gpus 9000: at most"),
        ("--gpu nothing.json", "--gpu nothing.json: No such file or directory: write it with"),
        ("--measure 5", "--measure finds 0 GPUs here: name a CPU, --gpu with a file of"),
        ("--gpus 7 --global-batch 15", "training.global_batch_size=15 must be a multiple of"),
        ("--lora.rank 4 --lora.targets nothing", "lora.targets=nothing"),
        ("--seq-len 999999", "training.seq_len=999999 exceeds max_seq_len="),
    ],
)
def test_a_mistake_is_one_line_with_its_remedy(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpus", "4", *_JOB, *words.split()]) == 2
    assert says in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"flops": None}, "flops is missing"),
        ({"speed": 1}, "speed is no figure of a device"),
        ({"link": "fast"}, 'link="fast" must be a positive number'),
        ({"latency": float("nan")}, "latency=NaN must be a positive number"),
        ({"cores": True}, "cores=true must be"),
    ],
)
def test_a_wrong_figure_of_a_device_is_named_with_its_file_and_remedy(
    change: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values, path = asdict(GPUS["H100"]) | change, tmp_path / "here.json"
    kept = {name: value for name, value in values.items() if value is not None}
    path.write_text(json.dumps(kept))
    assert main(["plan", "--gpus", "2", *_JOB, "--gpu", str(path)]) == 2
    line = capsys.readouterr().err.splitlines()[0]
    assert f"--gpu {path}: {says}" in line and f"titan-moe plan --calibrate {path}" in line


def test_a_file_of_a_device_is_taken_as_the_device_it_describes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.json"
    path.write_text(json.dumps(asdict(GPUS["H100"])))
    texts = []
    for gpu in ("h100", str(path)):
        assert main(["plan", "--gpus", "2", *_JOB, "--gpu", gpu, "--keep", "1"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_layouts_are_measured_beside_what_is_expected_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "here.json")
    assert main(["plan", "--calibrate", path]) == 0
    assert json.loads(Path(path).read_text())["cores"] > 0
    argv = ["plan", "--gpus", "2", *_JOB, "--gpu", path, "--keep", "2", "--measure", "4"]
    argv += ["--seq-len", "64", "--training.mixed_precision_param", "float32"]
    assert main([*argv, "--out", str(tmp_path / "out"), "--json"]) == 0
    captured = capsys.readouterr()
    first, second = json.loads(captured.out[captured.out.index("{") :])["measured"]
    assert first["measured"] > 0 and second["measured"] > 0
    assert "measures 1 of 2: " in captured.err


def test_a_layout_that_fails_is_a_line_with_its_reason_and_the_others_stand() -> None:
    rows = [
        {"degrees": "tp=2", "expected": 100.0, "measured": None, "reason": "error: no memory"},
        {"degrees": "ep=2", "expected": 100.0, "measured": 50.0},
    ]
    assert [line.split() for line in plan_here.table(rows)[2:]] == [
        ["50", "100", "0.50", "ep=2"],
        ["failed", "100", "tp=2:", "error:", "no", "memory"],
    ]
