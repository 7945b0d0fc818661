"""Small trainings in which one rank hangs as planted, and records of hangs made by hand."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.trainings import make_job
from titan_moe import train_step
from titan_moe.checkpoint.tensors import FolderWriter
from titan_moe.data.reader import StepReader
from titan_moe.debug import hang as hangs
from titan_moe.debug.hang_report import analyse, read_report
from titan_moe.models.hf import model_of_job
from titan_moe.moe.experts import Experts
from titan_moe.runtime.position import POSITION
from titan_moe.runtime.process import Process
from titan_moe.runtime.ranks import RankError, run_on_ranks
from titan_moe.trainer import train

LIMIT_S = 3
HANGS_IN_STEP = 3
_FOR_EVER = 600.0


def hang(folder: Path, plant: str, world_size: int = 2) -> list[str]:
    """The findings of a run whose rank 1 hangs in step 3."""
    try:
        run_on_ranks(train_watched, world_size, folder, plant)
    except RankError:
        _, report = read_report(folder)
        return analyse(report["records"], world_size)
    raise AssertionError("the run ended")


def train_watched(folder: Path, plant: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hangs._ANSWER_S = LIMIT_S
    saves = {"slow writer": 20 * LIMIT_S, "writer": LIMIT_S}
    checkpoint: dict[str, Any] = {"enable": False}
    if plant in saves:
        checkpoint = {"interval": HANGS_IN_STEP, "save_timeout_seconds": saves[plant]}
    job = make_job(
        folder,
        steps=2 * HANGS_IN_STEP,
        comm={"train_timeout_seconds": LIMIT_S},
        metrics={"log_freq": 100},  # A logged step has an all-reduce more.
        parallelism={"expert_parallel_degree": 2},
        checkpoint=checkpoint,
    )
    if rank == 1:
        PLANTS[plant]()
    process = Process(rank=rank, world_size=world_size, device=torch.device("cpu"))
    reports, save_limit = folder / "comm_traces", job.checkpoint.save_timeout_seconds
    with hangs.watch_for_hangs(process, job.comm, save_limit, reports, None):
        train(job, model_of_job(job.model), process)


def _in_step_3(module: object, name: str, instead: Callable) -> None:
    """In the third call of a function that each step calls once: `instead` of it, which is handed
    the function and its arguments."""
    original, calls = getattr(module, name), iter(range(1, 1000))

    def patched(*args, **kwargs):
        if next(calls) == HANGS_IN_STEP:
            return instead(original, *args, **kwargs)
        return original(*args, **kwargs)

    setattr(module, name, patched)


def _sleep(*args: object, **options: object) -> None:
    time.sleep(_FOR_EVER)


def _in_a_layer() -> None:
    forward = Experts.forward

    def patched(self, rows):
        place = POSITION.last()
        if (place.step, place.layer) == (HANGS_IN_STEP, "layer 2"):
            _sleep()
        return forward(self, rows)

    Experts.forward = patched  # type: ignore[method-assign]


def _write_slowly() -> None:
    """A save takes twice as long as a collective of training may."""
    write = FolderWriter.write_data

    def write_slowly(*args):
        time.sleep(2 * LIMIT_S)
        return write(*args)

    FolderWriter.write_data = write_slowly  # type: ignore[method-assign]


def _stop(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


PLANTS: dict[str, Callable[[], None]] = {
    "in a layer": _in_a_layer,
    "stopped": lambda: _in_step_3(train_step, "update_routers", _stop),
    "loader": lambda: _in_step_3(StepReader, "read_step", _sleep),
    "writer": lambda: setattr(FolderWriter, "write_data", _sleep),
    "slow writer": _write_slowly,
    # One rank leaves out the step's all-reduce.
    "other branch": lambda: _in_step_3(train_step, "sum_over_world", lambda _, terms: terms),
}


def call(number: int, place: str = "in the step", **changes: Any) -> dict[str, Any]:
    """A call of an all-reduce that has ended, as a record holds it."""
    return {
        "number": number,
        "operation": "all_reduce",
        "sizes": [[[4]], [[4]]],
        "dtypes": ["Float"],
        "seconds_ago": 1000.0 - number,
        "timeout_s": 130.0,
        "ended": True,
        "step": 12,
        "place": place,
        **changes,
    }


def record(rank: int, groups: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """The record that a rank makes of itself."""
    return {
        "rank": rank,
        "host": "node",
        "process": 1000 + rank,
        "step": 12,
        "phase": "step",
        "place": "in the step",
        "seconds_there": 100.0,
        "error": "",
        "groups": groups,
        "stack": ["titan_moe/train.py:9 in main", "/lib/torch/distributed.py:7 in wait"],
        "threads": {},
        **changes,
    }


def group(axes: str, ranks: list[int], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """A process group of a record."""
    return {"name": f"{axes} {ranks}", "axes": axes, "ranks": ranks, "calls": calls}
