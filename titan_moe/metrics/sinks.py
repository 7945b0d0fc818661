"""The sinks of metrics: every sink gets the same numbers at every logged step.

metrics.jsonl and the console are written in the step. Services may be slow or fail, so each has a
thread of its own and never holds up a run.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol, TextIO

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Metrics
from titan_moe.metrics.jsonl import JsonLines
from titan_moe.runtime.files import write_whole

logger = logging.getLogger(__name__)

_MOST_WAITING = 1000  # Logged steps; a service that is further behind misses some.
_LAST_WAIT_S = 60.0
_PARAMS_AT_ONCE = 100  # MLflow takes no more in one call.
TORCHTITAN_NAMES: Mapping[str, tuple[str, int, str | None]] = {
    "loss_metrics/global_avg_loss": ("loss", 1, None),
    "loss_metrics/global_max_loss": ("max_loss", 1, None),
    "validation_metrics/loss": ("validation_loss", 1, None),
    "n_tokens_seen": ("tokens", 1, None),
    "throughput(tps)": ("tokens_per_second_per_device", 1, None),
    "tflops": ("tflops_per_device", 1, None),
    "mfu(%)": ("mfu", 100, None),
    "time_metrics/end_to_end(s)": ("time/elapsed", 1, "steps"),
    "time_metrics/data_loading(s)": ("time/data", 1, "steps"),
    "time_metrics/data_loading(%)": ("time/data", 100, "time/elapsed"),
    "memory/max_active(GiB)": ("memory/peak_gib", 1, None),
    "memory/max_active(%)": ("memory/peak_gib", 100, "memory/gpu_gib"),
    "memory/max_reserved(GiB)": ("memory/reserved_gib", 1, None),
    "memory/max_reserved(%)": ("memory/reserved_gib", 100, "memory/gpu_gib"),
    "memory/num_alloc_retries": ("memory/allocation_retries", 1, None),
    "memory/num_ooms": ("memory/ooms", 1, None),
}
"""torchtitan's name of a metric, with the metric here, a factor, and the metric that divides it.
`grad_norm` and `lr` have the same name in both."""


class Sink(Protocol):
    """Takes the metrics of each logged step, in ascending order of steps, until it is closed.

    A run that resumes makes another, which gets later steps again.
    """

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def with_torchtitan_names(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a step, and those that torchtitan has under its names beside them."""
    theirs = {
        name: factor * values[ours] / (1 if per is None else values[per])
        for name, (ours, factor, per) in TORCHTITAN_NAMES.items()
        if ours in values and (per is None or per in values)
    }
    return {**values, **theirs}


def missing_packages(config: Metrics) -> list[str]:
    """Returns one line per sink that is switched on but not installed."""
    packages = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
    return [
        f"metrics.enable_{module} = true needs the package {package}: install it, or set the key "
        "to false"
        for module, package in packages.items()
        if getattr(config, f"enable_{module}") and find_spec(module) is None
    ]


def build_sinks(
    config: Metrics, dump_folder: Path, job: Mapping[str, Any], *, resume_step: int
) -> list[Sink]:
    """Returns metrics.jsonl and the services that are switched on, for the one rank that logs.

    Args:
        dump_folder: metrics.jsonl and the files of services lie in it.
        job: the whole configuration, which services show beside a run.
        resume_step: the step that the run starts after; 0 for a fresh run.

    Raises:
        ConfigError: a sink is switched on that is not installed.
    """
    if lines := missing_packages(config):
        raise ConfigError(lines)
    sinks: list[Sink] = [JsonLines(dump_folder / "metrics.jsonl", resume_step=resume_step)]
    if config.enable_tensorboard:
        folder = dump_folder / config.save_tb_folder
        sinks.append(Background("TensorBoard", lambda: TensorBoard(folder, job, resume_step)))
    if config.enable_wandb:
        sinks.append(Background("W&B", lambda: WeightsAndBiases(dump_folder, job, resume_step)))
    if config.enable_mlflow:
        sinks.append(Background("MLflow", lambda: MLflow(dump_folder, job, resume_step)))
    return sinks


# Columns of the console, from left to right: heading, metric and format.
_COLUMNS = (
    ("loss", "loss", "{:8.5f}"),
    ("grad norm", "grad_norm", "{:8.4f}"),
    ("lr", "lr", "{:.2e}"),
    ("tok/s/dev", "tokens_per_second_per_device", "{:7,.0f}"),
    ("TFLOP/s", "tflops_per_device", "{:6.2f}"),
    ("MFU", "mfu", "{:5.1%}"),
    ("GiB", "memory/peak_gib", "{:5.2f}"),
    ("retries", "memory/allocation_retries", "{:.0f}"),
    ("data s", "time/data", "{:5.2f}"),
    # Last, for they are missing from most lines.
    ("dropped", "dispatch/dropped", "{:.2%}"),
    ("val loss", "validation_loss", "{:8.5f}"),
)


class Console:
    """Prints a line of the metrics that a reader wants; leaves out what a run does not measure.

    Args:
        steps: the run's last step.
    """

    def __init__(self, stream: TextIO, *, steps: int) -> None:
        self._stream, self._steps = stream, steps

    def write(self, step: int, values: dict[str, float]) -> None:
        now, width = time.strftime("%H:%M:%S"), len(str(self._steps))
        columns = [f"{now} step {step:{width}d}/{self._steps}"]
        for label, key, template in _COLUMNS:
            if key in values:
                columns.append(f"{label} {template.format(values[key])}")
        print("  ".join(columns), file=self._stream, flush=True)

    def close(self) -> None:
        pass


class Background:
    """Makes, writes and closes a sink in a thread; the first error ends it with one warning."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name = name
        self._waiting: Queue[tuple[int, dict[str, float]] | None] = Queue(_MOST_WAITING)
        self._thread = Thread(target=self._run, args=(make,), name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        # "data" is a checksum.
        self._put((step, {key: x for key, x in values.items() if key != "data"}))

    def close(self) -> None:
        """Wait for the sink to end, but not longer than a minute."""
        self._put(None)
        self._thread.join(_LAST_WAIT_S)
        if self._thread.is_alive():
            logger.warning("%s has not ended within %g s", self._name, _LAST_WAIT_S)

    def _put(self, item: tuple[int, dict[str, float]] | None) -> None:
        with suppress(Full):
            self._waiting.put_nowait(item)

    def _run(self, make: Callable[[], Sink]) -> None:
        try:
            sink = make()
            while (item := self._waiting.get()) is not None:
                sink.write(*item)
            sink.close()
        except BaseException as error:  # Whatever a foreign package raises.
            reason = next(iter(str(error).splitlines()), "")
            name = type(error).__name__
            logger.warning("%s is off from here on: %s: %s", self._name, name, reason)


class TensorBoard:
    """TensorBoard scalars, under torchtitan's names too, and the configuration as text and as
    hyperparameters; what a resumed run repeats is hidden."""

    def __init__(self, folder: Path, job: Mapping[str, Any], resume_step: int) -> None:
        # Imported here: it costs a second, and most runs do not ask for it.
        from torch.utils.tensorboard import SummaryWriter, summary

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)
        self._writer.add_text("config", f"```json\n{json.dumps(job, indent=1)}\n```", resume_step)
        # Not add_hparams, which makes another run of them.
        for each in summary.hparams(_parameters(job), {"loss": 0.0}):
            self._writer.file_writer.add_summary(each)  # type: ignore[attr-defined]

    def write(self, step: int, values: dict[str, float]) -> None:
        for key, value in with_torchtitan_names(values).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()  # A failed run never closes it, and two minutes would be lost.

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run; its project and mode follow W&B's own environment variables.

    W&B ignores what is logged under a lower step than its last one. Steps that are made again are
    logged under its next one, so that none is lost, and all charts are over our own "step".
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], resume_step: int) -> None:
        import wandb

        place = folder / "wandb_run_id"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "titan_moe"),
            dir=str(folder),
            config=dict(job),
            id=_earlier(place, resume_step),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="step")
        write_whole(place, self._run.id)

    def write(self, step: int, values: dict[str, float]) -> None:
        named = {"step": step, **with_torchtitan_names(values)}
        self._run.log(named, step=max(step, self._run.step), commit=True)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """An MLflow run, at MLFLOW_TRACKING_URI or, without it, in the run's folder mlruns.

    MLflow keeps both values of a step that is made again.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], resume_step: int) -> None:
        import mlflow

        self._mlflow = mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            # A database would want packages that mlflow-skinny does not bring along.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            mlflow.set_tracking_uri((folder / "mlruns").resolve().as_uri())
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
            mlflow.set_experiment("titan_moe")
        place = folder / "mlflow_run_id"
        earlier = _earlier(place, resume_step)
        run = mlflow.start_run(run_id=earlier)
        if earlier is None:
            params = list(_parameters(job).items())
            for first in range(0, len(params), _PARAMS_AT_ONCE):
                mlflow.log_params(dict(params[first : first + _PARAMS_AT_ONCE]))
        write_whole(place, run.info.run_id)

    def write(self, step: int, values: dict[str, float]) -> None:
        # Its folders cannot hold a metric "lr" beside "lr/decay".
        named = {"lr/max" if key == "lr" else key: value for key, value in values.items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _parameters(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of all tables by their dotted names; what is no number, as text."""
    tables = {table: keys for table, keys in job.items() if isinstance(keys, Mapping)}
    named = {f"{table}.{key}": x for table, keys in tables.items() for key, x in keys.items()}
    return {key: x if isinstance(x, int | float) else str(x) for key, x in named.items()}


def _earlier(place: Path, resume_step: int) -> str | None:
    """Returns the service's name of the run that this one goes on with."""
    if not resume_step or not place.is_file():
        return None
    return place.read_text(encoding="utf-8").strip()
