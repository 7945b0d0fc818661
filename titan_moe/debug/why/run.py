"""A run as its folder describes it, and where one of its steps can be made again from."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.checkpoint.storage import saved_steps, step_folder
from titan_moe.config.checks.job import check
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import (
    Checkpoint,
    Compile,
    JobConfig,
    Parallelism,
    Training,
)
from titan_moe.config.parse import load_job
from titan_moe.data.build import check_data
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.launch import count_gpus


class Decisions(NamedTuple):
    """What the run decided about steps between a checkpoint and the one that is made again."""

    left_out: int = 0
    """Batches after the checkpoint's position that it did not go on with, when it went back."""
    skipped: frozenset[int] = frozenset()
    """Steps that made no update."""
    ended: Mapping[str, Any] | None = None
    """The decision that ended this very step: the run stopped in it, or went back."""


_NONE = Decisions()


@dataclass(frozen=True)
class Run:
    """A step of a run, and what is needed to make it again."""

    folder: Path
    step: int
    job: JobConfig
    """Of the process that made the step, but laid out for one process."""
    checkpoint: Path | None
    """The nearest one before the step; None: the run's beginning."""
    logged: Mapping[int, Mapping[str, Any]]
    """The lines of metrics.jsonl, by step."""
    decisions: Decisions = _NONE

    @property
    def first(self) -> int:
        """The first step to be made again."""
        return 1 if self.checkpoint is None else _step_of(self.checkpoint) + 1


def find_run(folder: Path, step: int, *, most_repeated: int) -> Run:
    """The run in a folder. Raises ConfigError with a line for what keeps the step from being made
    again, as far as that shows without a model; RunError for a checkpoint that cannot be read.

    Args:
        most_repeated: steps between the checkpoint and this one that may be made again.
    """
    if not folder.is_dir():
        raise ConfigError([f"{folder}: no such folder: name a run's job.dump_folder"])
    config = _config(folder)
    name = (Checkpoint() if config is None else config.checkpoint).folder
    steps = saved_steps(folder / name)
    if config is None and not steps:
        raise ConfigError(
            [f"{folder} holds no run: neither config.toml nor a checkpoint in {name}/ is there"]
        )
    logged = _logged(folder)
    job = _job_of(step, steps, folder / name, config)
    _check_reached(folder, step, steps, logged, job)
    found = _nearest(folder / name, [each for each in steps if each < step])
    decided = decisions(_events(folder), 0 if found is None else _step_of(found), step)
    if decided.ended is not None:  # What the log has of it was made later, of other data.
        since = 0 if found is None else _step_of(found)
        logged = {at: line for at, line in logged.items() if not since < at <= step}
        logged[step] = dict(decided.ended)
    run = Run(folder, step, on_one_process(job, folder, found), found, logged, decided)
    if step - run.first > most_repeated:
        start = "its beginning" if found is None else str(found)
        raise ConfigError(
            [
                f"step {step} is {step - run.first} steps after {start}, the nearest that "
                f"{folder} can be repeated from: --max-repeated {step - run.first} makes them all "
                "again; a smaller checkpoint.interval spares that"
            ]
        )
    problems = check(run.job, model_of_job(run.job.model), 1, num_gpus=count_gpus(os.environ))
    problems += check_data(run.job.training, run.job.validation, run.job.model.tokenizer_path)
    if problems:
        raise ConfigError(problems)
    return run


def decisions(events: Sequence[Mapping[str, Any]], begin: int, step: int) -> Decisions:
    """Of the lines of events.jsonl, which are in the order of time.

    Args:
        begin: the step of the checkpoint.
        step: the one to make again; of one that the run went back from, the last time it did.
    """

    def ends(event: Mapping[str, Any]) -> bool:
        back = event.get("decision") == "roll_back" and event.get("checkpoint") == begin
        return event["step"] == step and (back or event.get("decision") == "stop")

    until = max((at for at, event in enumerate(events) if ends(event)), default=None)
    since, left_out = 0, 0
    for at, event in enumerate(events[:until]):
        if event.get("decision") == "roll_back" and event.get("checkpoint") == begin:
            since, left_out = at + 1, left_out + event["step"] - begin
    skipped = {e["step"] for e in events[since:until] if e.get("decision") == "skip"}
    return Decisions(left_out, frozenset(skipped), None if until is None else events[until])


def on_one_process(job: JobConfig, folder: Path, checkpoint: Path | None) -> JobConfig:
    """The same training of the same data, laid out for one process that saves nothing and holds the
    activations of one sequence.

    Args:
        checkpoint: of the run's own to go on from; None: begin as the run began.
    """
    alone = {"parallelism": Parallelism(), "local_batch_size": None}
    training = {name: "stop" for name in Training.model_fields if name.startswith("on_")}
    recompute = {"keep_exchanged_rows": False}
    traces = {"routing_record": None, "routing_replay": None, "capture_step": 0}
    loading: dict[str, Any] = {"load_only": True, "create_seed_checkpoint": False}
    if checkpoint is not None:
        step = _step_of(checkpoint)
        loading |= {"enable": True, "load_step": step, "exclude_from_loading": []}
    else:  # In a folder without later ones.
        loading |= {"folder": ".none", "load_step": -1}
    return job.model_copy(
        update={
            "job": job.job.model_copy(update={"dump_folder": str(folder)}),
            "parallelism": Parallelism(),
            "compile": Compile(),
            "training": job.training.model_copy(update=training | {"local_batch_size": 1}),
            "stages": [stage.model_copy(update=alone) for stage in job.stages],
            "activation_checkpoint": job.activation_checkpoint.model_copy(update=recompute),
            "debug": job.debug.model_copy(update=traces),
            "checkpoint": job.checkpoint.model_copy(update=loading),
        }
    )


def _config(folder: Path) -> JobConfig | None:
    """What the last process of the run wrote."""
    path = folder / "config.toml"
    return load_job(["--job.config_file", str(path)]) if path.is_file() else None


def _job_of(step: int, steps: list[int], folder: Path, config: JobConfig | None) -> JobConfig:
    """The configuration under which a step was made: a resumed run may have had another one before
    and after. The process that made it wrote the next checkpoint, or else was the last one."""
    later = [each for each in steps if each >= step]
    if not later and config is not None:
        return config
    path = step_folder(folder, later[0] if later else steps[-1])
    try:
        return JobConfig.model_validate(read_manifest(path).job)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            [
                f"{path} was written with {key}, which this version of titan_moe does not read "
                f"({first['msg']}): use the version that wrote it"
            ]
        ) from None


def _logged(folder: Path) -> dict[int, dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = read_json_lines(path) if path.is_file() else []
    return {line["step"]: line for line in lines if isinstance(line.get("step"), int)}


def _events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    lines = read_json_lines(path) if path.is_file() else []
    return [line for line in lines if isinstance(line.get("step"), int)]


def _check_reached(
    folder: Path, step: int, steps: list[int], logged: Mapping[int, Any], job: JobConfig
) -> None:
    """A run that stopped in a step did not log it."""
    last = max([*logged, *steps], default=0)
    most = min(job.training.steps, max(last + 1, max(logged, default=0) + job.metrics.log_freq))
    if step > most:
        raise ConfigError(
            [f"step {step} is beyond the run in {folder}, which came to {last}: choose 1 to {most}"]
        )


def _nearest(folder: Path, steps: list[int]) -> Path | None:
    """The latest of these checkpoints that a run can go on from."""
    for step in reversed(steps):
        path = step_folder(folder, step)
        if not read_manifest(path).model_only or step == 0:
            return path
    return None


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
