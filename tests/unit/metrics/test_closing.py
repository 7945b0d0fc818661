"""What a run says at its end."""

import math
import sys
from pathlib import Path

import pytest

from titan_moe.config.job_config import Checkpoint, LRScheduler, Training
from titan_moe.data.tokenizer import load_tokenizer, loss_unit
from titan_moe.metrics import closing
from titan_moe.optim.schedules import lr_factor
from titan_moe.runtime import command_lines
from titan_moe.runtime.launch import Launch

TWO = Launch(world_size=2, local_world_size=2)
CPU = {"CUDA_VISIBLE_DEVICES": ""}


def said(**changed):
    words = {
        "checkpoint": Path("out/checkpoint/step-300"),
        "stopped": False,
        "resumable": True,
        "longer": ["--training.steps", "600"],
        "prompt": "def ",
        "launch": TWO,
        "environment": CPU,
    }
    first, *commands = closing.next_steps(Path("out"), **(words | changed)).split("\n  ")
    assert first.startswith("next you can ") and first.endswith(":")
    return commands


@pytest.fixture(autouse=True)
def _console(monkeypatch):
    monkeypatch.setattr(closing, "console", lambda: ["titan-moe"])
    monkeypatch.setattr(command_lines, "console", lambda: ["titan-moe"])


def test_the_loss_of_bytes_is_told_in_bits():
    told = closing.outcome(300, 1.7, 1.93, *loss_unit(load_tokenizer("bytes")))
    assert told == (
        "step 300: loss 1.70 nats (2.45 bits) per byte, on held-out documents 1.93 nats "
        "(2.78 bits); a uniform guess is 5.55 nats (8 bits)"
    )


def test_without_validation_nothing_is_said_of_it():
    told = closing.outcome(5, math.log(1000), None, "token", 1000)
    assert told == (
        "step 5: loss 6.91 nats (9.97 bits) per token; a uniform guess is 6.91 nats (9.966 bits)"
    )


def test_a_run_that_stopped_says_how_it_goes_on(monkeypatch):
    monkeypatch.chdir(command_lines.CHECKOUT)
    first, *lines, following = closing.closing_lines(
        Training(steps=300),
        Checkpoint(enable=True),
        LRScheduler(),
        Path("out"),
        step=7,
        outcome="step 7: loss 1.00",
        last_saved=7,
        launch=TWO,
        environment=CPU,
    )
    assert first == "step 7: loss 1.00"
    assert lines == ["metrics out/metrics.jsonl", "checkpoints out/checkpoint"]
    first, *others = following.split("\n  ")[1:]
    assert first == "CONFIG_FILE=out/config.toml ./run_train.sh"
    assert len(others) == 2 and "step-7 --prompt" in others[0]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"min_lr_factor": 0.05}, "--training.steps 600 --lr_scheduler.total_steps 300"),
        ({"decay_ratio": 0.0}, "--training.steps 600"),
        ({"total_steps": 900}, "--training.steps 600"),
        ({"min_lr_factor": 0.0}, ""),
    ],
)
def test_training_on_keeps_the_rate_of_the_end(schedule, words):
    settings = LRScheduler(warmup_steps=10, **schedule)
    assert " ".join(closing.longer(300, settings)) == words
    told = dict(zip(words.split()[::2], words.split()[1::2], strict=True))
    if told:
        total = told.get("--lr_scheduler.total_steps", settings.total_steps)
        after = settings.model_copy(update={"total_steps": total and int(total)})
        end = lr_factor(300, settings, 300)
        assert 0 < lr_factor(301, after, 600) <= end


def test_steps_without_an_update_are_named(tmp_path):
    def lines():
        return closing.closing_lines(
            Training(steps=7),
            Checkpoint(),
            LRScheduler(),
            tmp_path,
            step=7,
            outcome="step 7: loss 1.00",
            last_saved=None,
            launch=TWO,
            environment=CPU,
        )

    assert not any("events" in line for line in lines())
    (tmp_path / "events.jsonl").touch()
    named = f"steps that were left out or trained again: {tmp_path}/events.jsonl"
    assert named in lines()


def test_the_commands_of_a_checkout(monkeypatch):
    monkeypatch.chdir(command_lines.CHECKOUT)
    generate, longer, page = said()
    assert generate == "titan-moe generate out/checkpoint/step-300 --prompt 'def '"
    assert longer == "CONFIG_FILE=out/config.toml ./run_train.sh --training.steps 600"
    assert page == "titan-moe report run out"
    _, longer, _ = said(launch=Launch(world_size=4, local_world_size=4))
    assert longer.startswith("CONFIG_FILE=out/config.toml NGPU=4 ./run_train.sh ")


def test_the_command_of_another_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, longer, _ = said()
    assert f" {command_lines.CHECKOUT}/run_train.sh " in longer


def test_the_command_of_an_installed_package(tmp_path, monkeypatch):
    monkeypatch.setattr(command_lines, "CHECKOUT", tmp_path)
    _, longer, _ = said()
    assert longer == "titan-moe train --config out/config.toml --ranks 2 --training.steps 600"


def test_what_cannot_be_done_is_not_proposed():
    start, _ = said(checkpoint=None)
    assert start.endswith("run_train.sh --checkpoint.enable")
    assert len(said(resumable=False)) == 2
    assert len(said(launch=Launch(world_size=16, local_world_size=8, num_nodes=2))) == 2


def test_titan_moe_is_named_as_the_shell_finds_it(tmp_path, monkeypatch):
    monkeypatch.undo()
    python = tmp_path / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    assert command_lines.console() == [str(python), "-m", "titan_moe"]
    program = tmp_path / "bin" / "titan-moe"
    program.parent.mkdir()
    program.touch(mode=0o755)
    assert command_lines.console() == [str(program)]
    monkeypatch.setenv("PATH", str(program.parent))
    assert command_lines.console() == ["titan-moe"]
