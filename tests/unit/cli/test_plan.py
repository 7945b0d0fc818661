"""`titan-moe plan`: layouts that fit, files that the checks accept, mistakes in one line."""

from pathlib import Path

import pytest

from titan_moe.cli.main import main

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
