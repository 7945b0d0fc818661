"""build_sinks: which sinks a configuration gets, and what they receive."""

import sys
from types import SimpleNamespace

import pytest

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Metrics
from titan_moe.metrics import sinks
from titan_moe.metrics.jsonl import read_json_lines


def log_one_step(config, folder):
    for sink in sinks.build_sinks(config, folder, resume_step=0):
        sink.write(4, {"loss": 2.5})
        sink.close()


def test_the_file_is_always_on(tmp_path):
    log_one_step(Metrics(), tmp_path)
    assert read_json_lines(tmp_path / "metrics.jsonl") == [{"step": 4, "loss": 2.5}]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_holds_the_scalar(tmp_path):
    log_one_step(Metrics(enable_tensorboard=True, save_tb_folder="events"), tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(4, 2.5)]


def test_weights_and_biases_gets_the_step(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end")
    )
    wandb = SimpleNamespace(init=lambda **keys: run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(sinks, "find_spec", lambda name: wandb)
    log_one_step(Metrics(enable_wandb=True), tmp_path)
    assert calls == [(4, {"loss": 2.5}), "end"]


def test_a_missing_package_is_one_line_before_any_file_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        log_one_step(Metrics(enable_wandb=True), tmp_path)
    assert error.value.lines == [
        "metrics.enable_wandb = true needs the package wandb: install it, or set the key to false"
    ]
    assert list(tmp_path.iterdir()) == []
