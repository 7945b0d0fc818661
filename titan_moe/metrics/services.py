"""Sinks of other makers, which may be slow or fail, and must not hold up a run."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import Full, Queue
from threading import Event, Lock, Thread
from typing import Any, Protocol

from titan_moe.runtime.files import write_whole

_MOST_WAITING = 100  # Logged steps that a sink may be behind.
_LAST_WAIT_S = 60.0
_MOST_LAYERS = 32
_PARAMS_AT_ONCE = 100  # MLflow takes no more in one call.

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the metrics of each logged step, in ascending order of steps, until it is closed. A run
    that goes back, or resumes, closes it and makes another, which gets later steps again."""

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Background:
    """A sink that is made, written and closed in a thread of its own.

    Where it raises, or falls too far behind, there is one warning, and it is off from then on.
    """

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name = name
        self._off = Event()
        self._giving_up = Lock()
        self._waiting: Queue[tuple[int, dict[str, float]] | None] = Queue(_MOST_WAITING)
        self._thread = Thread(target=self._run, args=(make,), name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        self._put((step, dict(values)))

    def close(self) -> None:
        """Wait for the sink to end, but not longer than a minute."""
        self._put(None)
        if not self._off.is_set():
            self._thread.join(_LAST_WAIT_S)
            if self._thread.is_alive():
                self._give_up(f"it has not ended within {_LAST_WAIT_S:g} s")

    def _put(self, item: tuple[int, dict[str, float]] | None) -> None:
        if self._off.is_set():
            return
        try:
            self._waiting.put_nowait(item)
        except Full:
            self._give_up(f"it is {_MOST_WAITING} logged steps behind")

    def _run(self, make: Callable[[], Sink]) -> None:
        try:
            sink = make()
            while (item := self._waiting.get()) is not None and not self._off.is_set():
                sink.write(*item)
            sink.close()
        except BaseException as error:  # Whatever a foreign package raises.
            reason = next(iter(str(error).splitlines()), "")
            self._give_up(f"{type(error).__name__}: {reason}")

    def _give_up(self, reason: str) -> None:
        with self._giving_up:  # Two threads may find a reason at once.
            if not self._off.is_set():
                logger.warning("%s is off from here on: %s", self._name, reason)
                self._off.set()


class TensorBoard:
    """TensorBoard scalars; what a resumed run repeats is hidden."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        # Imported here: it costs a second, and most runs do not ask for it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run; its project and mode follow W&B's own environment variables.

    W&B ignores what is logged under a lower step than its last one. Steps that are made again are
    logged under its next one, so that none is lost, and all charts are over our own "step".
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], *, resume_step: int) -> None:
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
        at = max(step, self._run.step)
        self._run.log({"step": step, **bounded(values)}, step=at, commit=True)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """An MLflow run, at MLFLOW_TRACKING_URI or, left out, in the folder mlruns of the run's own. It
    keeps both values of a step that is made again."""

    def __init__(self, folder: Path, job: Mapping[str, Any], *, resume_step: int) -> None:
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
            params = list(_flat(job))
            for first in range(0, len(params), _PARAMS_AT_ONCE):
                mlflow.log_params(dict(params[first : first + _PARAMS_AT_ONCE]))
        write_whole(place, run.info.run_id)

    def write(self, step: int, values: dict[str, float]) -> None:
        # Its folders cannot hold a metric "lr" beside "lr/decay".
        named = {"lr/max" if key == "lr" else key: value for key, value in bounded(values).items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def bounded(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a service gets: those of at most 32 MoE layers, evenly spaced from the first
    to the last. A page of charts is slow with more; metrics.jsonl has all."""
    layers = list(dict.fromkeys(layer for key in values if (layer := _layer(key))))
    if len(layers) > _MOST_LAYERS:
        last = len(layers) - 1
        layers = [layers[at * last // (_MOST_LAYERS - 1)] for at in range(_MOST_LAYERS)]
    wanted = {"", *layers}
    return {key: value for key, value in values.items() if _layer(key) in wanted}


def _layer(key: str) -> str:
    """The MoE layer that a metric is of; empty for the others."""
    return key.rpartition("/")[0] if key.startswith("moe/") else ""


def _earlier(place: Path, resume_step: int) -> str | None:
    """The service's name of the run that this one goes on with."""
    if not resume_step or not place.is_file():
        return None
    return place.read_text(encoding="utf-8").strip()


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
