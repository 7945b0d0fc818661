"""build_sinks: which sinks a configuration gets, what they receive, and what a bad one costs."""

import io
import itertools
import logging
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.support.refusals import refusal
from titan_moe.config.job_config import Metrics
from titan_moe.metrics import sinks
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.metrics.sinks import Background, Console
from titan_moe.prepare.job import check_all

JOB = {"training": {"steps": 3, "blend": []}, "model": {"name": "qwen3"}}


def log_one_step(config, folder, *, step=4, resume_step=0, **more):
    for sink in sinks.build_sinks(config, folder, JOB, resume_step=resume_step):
        sink.write(step, {"loss": 2.5, **more})
        sink.close()


def test_metrics_jsonl_is_always_written(tmp_path):
    log_one_step(Metrics(), tmp_path)
    assert read_json_lines(tmp_path / "metrics.jsonl") == [{"step": 4, "loss": 2.5}]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def stand_in(monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sinks, "find_spec", lambda name: module)


class Services:
    """Stands in for W&B and its server: the history of each run, by its name."""

    def __init__(self):
        self.runs = {}
        self.axes = []

    def init(self, **keys):
        assert keys.keys() == {"project", "dir", "config", "id", "resume"}  # WANDB_MODE says more.
        assert keys["resume"] == "allow" and keys["config"]["model"]["name"] == "qwen3"
        name = keys["id"] or f"run{len(self.runs) + 1}"
        history = self.runs.setdefault(name, {})

        def log(values, *, step, commit):
            assert commit, "the next call with the same step would be added to this one"
            if step >= run.step:  # Otherwise W&B warns and ignores it.
                history[step] = values
                run.step = step + 1

        run = SimpleNamespace(
            id=name,
            step=max(history, default=-1) + 1,
            define_metric=lambda name, step_metric: self.axes.append((name, step_metric)),
            log=log,
            finish=lambda: None,
        )
        return run


STEPS_MADE_AGAIN = [(range(1, 8), 0), (range(5, 10), 4), (range(9, 12), 8)]
"""Logged steps from a start, and the step that it is after."""


def log_again(config, folder):
    """A run that goes back twice; each time, it makes steps again, with another loss."""
    for times, (steps, resume_step) in enumerate(STEPS_MADE_AGAIN):
        opened = sinks.build_sinks(config, folder, JOB, resume_step=resume_step)
        for step, sink in itertools.product(steps, opened):
            sink.write(step, {"loss": step + times / 10})
        for sink in opened:
            sink.close()


LOGGED = [(1.0 * step + times / 10) for times, (x, _) in enumerate(STEPS_MADE_AGAIN) for step in x]


def test_weights_and_biases_resumes_its_run_over_steps_made_again(tmp_path, monkeypatch):
    wandb = Services()
    stand_in(monkeypatch, "wandb", wandb)
    log_again(Metrics(enable_wandb=True), tmp_path)
    (history,) = wandb.runs.values()
    assert [values["loss"] for values in history.values()] == LOGGED
    assert [values["step"] for values in history.values()] == [int(loss) for loss in LOGGED]
    assert history[3]["loss_metrics/global_avg_loss"] == 3.0
    assert wandb.axes == [("*", "step")] * 3
    log_one_step(Metrics(enable_wandb=True), tmp_path)  # A start from step 0 is another run.
    assert wandb.runs.keys() == {"run1", "run2"}


def events(folder):
    """TensorBoard's own reading of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_hides_steps_that_are_made_again(tmp_path):
    log_again(Metrics(enable_tensorboard=True, save_tb_folder="events"), tmp_path)
    logged = events(tmp_path / "events").Scalars("loss")
    found = [(event.step, round(event.value, 5)) for event in logged]
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    assert found == [(line["step"], line["loss"]) for line in lines]
    assert [step for step, _ in found] == list(range(1, 12))


def test_tensorboard_events_are_on_disk_before_the_run_ends(tmp_path):
    sink = sinks.TensorBoard(tmp_path, JOB, resume_step=0)
    sink.write(1, {"loss": 2.5})
    assert "loss" in events(tmp_path).Tags()["scalars"]
    sink.close()


TORCHTITAN = {
    "grad_norm": 1.5, "lr": 8e-4, "n_tokens_seen": 4096, "loss_metrics/global_avg_loss": 5.61234567,
    "loss_metrics/global_max_loss": 6.5, "validation_metrics/loss": 4.5, "mfu(%)": 41.69,
    "throughput(tps)": 12345, "tflops": 412.345, "time_metrics/end_to_end(s)": 0.4,
    "time_metrics/data_loading(s)": 0.00246, "time_metrics/data_loading(%)": 0.615,
    "memory/max_active(GiB)": 71.256, "memory/max_active(%)": 89.07, "memory/num_ooms": 1,
    "memory/max_reserved(GiB)": 76, "memory/max_reserved(%)": 95, "memory/num_alloc_retries": 2,
}  # fmt: skip
"""The scalars of torchtitan 0.2.2, with their values for `VALUES`."""


def test_tensorboard_has_torchtitans_tags_and_the_configuration(tmp_path):
    log_one_step(Metrics(enable_tensorboard=True), tmp_path, **(VALUES | {"data": 2.0**40}))
    found = events(tmp_path / "tb")
    scalars = {tag: found.Scalars(tag)[0].value for tag in found.Tags()["scalars"]}
    assert scalars == pytest.approx({**VALUES, **TORCHTITAN}, rel=1e-6)  # Not the checksum.
    (text,) = found.Tensors("config/text_summary")
    assert '"name": "qwen3"' in text.tensor_proto.string_val[0].decode()
    assert "training.steps" in str(found.PluginTagToContent("hparams"))
    assert len(list((tmp_path / "tb").iterdir())) == 1


def test_mlflow_resumes_its_run(tmp_path, monkeypatch):
    calls = []

    def start_run(run_id):
        calls.append(run_id)
        return SimpleNamespace(info=SimpleNamespace(run_id="run1"))

    mlflow = SimpleNamespace(
        set_tracking_uri=calls.append,
        set_experiment=calls.append,
        start_run=start_run,
        log_params=calls.append,
        log_metrics=lambda values, step: calls.append((step, values)),
        end_run=lambda: calls.append("end"),
    )
    stand_in(monkeypatch, "mlflow", mlflow)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_one_step(Metrics(enable_mlflow=True), tmp_path)
    params = {"training.steps": 3, "training.blend": "[]", "model.name": "qwen3"}
    begin = [(tmp_path / "mlruns").as_uri(), "titan_moe"]
    assert calls == [*begin, None, params, (4, {"loss": 2.5}), "end"]
    calls.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking")
    rates = {"lr": 2.0, "lr/decay": 1.0}
    log_one_step(Metrics(enable_mlflow=True), tmp_path, resume_step=4, **rates)
    logged = {"loss": 2.5, "lr/max": 2.0, "lr/decay": 1.0}
    assert calls == ["titan_moe", "run1", (4, logged), "end"]


@pytest.mark.parametrize(
    ("key", "package"), [("enable_wandb", "wandb"), ("enable_mlflow", "mlflow-skinny")]
)
def test_missing_package_is_refused_before_any_file_is_touched(tmp_path, monkeypatch, key, package):
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    line = f"metrics.{key} = true needs the package {package}: install it, or set the key to false"
    assert refusal(log_one_step, Metrics(**{key: True}), tmp_path) == line
    assert list(tmp_path.iterdir()) == []
    assert refusal(check_all, [f"--metrics.{key}", "true"], 1, 1, {}) == line


def failing(at, error):
    """A sink that raises at a call of the given name."""

    def call(name):
        if name == at:
            raise error

    call("init")
    return SimpleNamespace(write=lambda *_: call("write"), close=lambda: call("close"))


@pytest.mark.parametrize("at", ["init", "write", "close"])
@pytest.mark.parametrize("error", [OSError("no network\nat all"), SystemExit(1)])
def test_background_warns_once_of_a_failing_sink(caplog, at, error):
    sink = Background("W&B", lambda: failing(at, error))
    for step in range(5):
        sink.write(step, {"loss": 1.0})
    sink.close()
    sink.write(6, {"loss": 1.0})
    (record,) = caplog.records
    said = "OSError: no network" if isinstance(error, OSError) else "SystemExit: 1"
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"W&B is off from here on: {said}"


def test_background_does_not_wait_for_a_sink_that_hangs(caplog, monkeypatch):
    monkeypatch.setattr(sinks, "_LAST_WAIT_S", 0.05)
    monkeypatch.setattr(sinks, "_MOST_WAITING", 3)
    forever = threading.Event()
    sink = Background("W&B", forever.wait)
    for step in range(9):
        sink.write(step, {"loss": 1.0})
    sink.close()
    forever.set()
    assert caplog.messages == ["W&B has not ended within 0.05 s"]


def test_background_writes_steps_in_order(tmp_path):
    found = []
    sink = Background("list", lambda: SimpleNamespace(write=lambda *x: found.append(x), close=list))
    values = {}
    for step in range(50):
        values["loss"] = float(step)
        sink.write(step, values)
    sink.close()
    assert found == [(step, {"loss": float(step)}) for step in range(50)]


VALUES = {
    "loss": 5.61234567,
    "grad_norm": 1.5,
    "lr": 8e-4,
    "tokens_per_second": 24690.0,
    "tokens_per_second_per_device": 12345.0,
    "tflops_per_device": 412.345,
    "mfu": 0.4169,
    "memory/peak_gib": 71.256,
    "memory/allocation_retries": 2.0,
    "time/data": 0.0123,
    "moe/layers.1/cv": 0.1,
    "max_loss": 6.5,
    "validation_loss": 4.5,
    "tokens": 4096,
    "steps": 5,
    "time/elapsed": 2.0,
    "memory/reserved_gib": 76.0,
    "memory/gpu_gib": 80.0,
    "memory/ooms": 1,
}


def test_console_line_has_the_measured_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "13:46:43")
    stream = io.StringIO()
    console = Console(stream, steps=1000)
    console.write(7, VALUES)
    console.write(8, {"loss": 1.0, "lr": 0.0})
    full, short = stream.getvalue().splitlines()
    assert full == (
        "13:46:43 step    7/1000  loss  5.61235  grad norm   1.5000  lr 8.00e-04  "
        "tok/s/dev  12,345  TFLOP/s 412.35  MFU 41.7%  GiB 71.26  retries 2  data s  0.01  "
        "val loss  4.50000"
    )
    assert short == "13:46:43 step    8/1000  loss  1.00000  lr 0.00e+00"
