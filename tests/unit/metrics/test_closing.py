"""The last lines of a run name its loss, its files and commands that work."""

import sys

import pytest

from titan_moe.config.job_config import Checkpoint, Training
from titan_moe.data.tokenizer import load_tokenizer, loss_unit
from titan_moe.metrics import closing
from titan_moe.runtime.launch import Launch, titan_moe_command


def closing_lines(folder, *, ranks=2, nodes=1, step=300, last_saved=300, keys=None, **options):
    *lines, following = closing.closing_lines(
        Training(steps=300, **(keys or {})),
        Checkpoint(),
        folder,
        step=step,
        outcome="step 300: loss 1.00",
        last_saved=last_saved,
        launch=Launch(world_size=ranks, local_world_size=ranks // nodes),
        **options,
    )
    first, *commands = following.split("\n  ")
    assert first.startswith("next you can ") and first.endswith(":")
    return lines, commands


@pytest.fixture(autouse=True)
def _console(monkeypatch):
    monkeypatch.setattr(closing, "titan_moe_command", lambda: ["titan-moe"])


def test_outcome_has_losses_in_nats_and_bits():
    assert closing.outcome(300, 1.7, 1.93, *loss_unit(load_tokenizer("bytes"))) == (
        "step 300: loss 1.70 nats (2.45 bits) per byte, on held-out documents 1.93 nats "
        "(2.78 bits); a uniform guess is 5.55 nats (8 bits)"
    )


def test_closing_lines_name_files_and_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = f"titan-moe train --config {tmp_path}/config.toml --ranks"
    generate = f"titan-moe generate {tmp_path}/checkpoint/step-{{}} --prompt"
    page = f"titan-moe report run {tmp_path}"

    lines, commands = closing_lines(tmp_path)
    assert lines == [
        "step 300: loss 1.00",
        f"metrics {tmp_path}/metrics.jsonl",
        f"checkpoints {tmp_path}/checkpoint",
    ]
    assert commands[0].startswith(generate.format(300)) and commands[1:] == [page]

    (tmp_path / "events.jsonl").touch()
    lines, commands = closing_lines(tmp_path, step=7, last_saved=7, ranks=4)
    assert f"steps that were left out or trained again: {tmp_path}/events.jsonl" in lines
    assert commands[0] == f"{start} 4" and "step-7 " in commands[1]

    assert closing_lines(tmp_path, last_saved=None)[1] == [f"{start} 2 --checkpoint.enable", page]
    assert closing_lines(tmp_path, ranks=16, nodes=2, last_saved=None)[1] == [page]
    saved = f"{tmp_path}/checkpoint/step-300"
    merge = f"titan-moe hf merge {saved} --out {saved}-merged"
    assert closing_lines(tmp_path, adapts=True)[1] == [merge, page]
    talks = {"dataset": "json", "dataset_format": "messages"}
    assert closing_lines(tmp_path, keys=talks)[1][0].endswith(" --chat --prompt Hi")


def test_titan_moe_command_is_what_the_shell_finds(tmp_path, monkeypatch):
    python = tmp_path / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    assert titan_moe_command() == [str(python), "-m", "titan_moe"]
    program = tmp_path / "bin" / "titan-moe"
    program.parent.mkdir()
    program.touch(mode=0o755)
    assert titan_moe_command() == [str(program)]
    monkeypatch.setenv("PATH", str(program.parent))
    assert titan_moe_command() == ["titan-moe"]
