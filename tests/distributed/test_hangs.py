"""Planted hangs are diagnosed: which call waits, who is there, and where the others are."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.tiers import split
from tests.support.trainings import make_job, process_here, replace_call
from titan_moe.checkpoint.tensors import FolderWriter
from titan_moe.data.loader import StepReader
from titan_moe.debug import hang as hangs
from titan_moe.debug.hang_report import analyse, read_report
from titan_moe.models.hf import model_of_job
from titan_moe.moe.experts import ExpertOutputs
from titan_moe.runtime.position import POSITION
from titan_moe.runtime.ranks import RankError, run_on_ranks
from titan_moe.training import train_step
from titan_moe.training.trainer import train

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
    hangs._ANSWER_S = LIMIT_S
    saves = {"slow writer": 20 * LIMIT_S, "writer": LIMIT_S}
    checkpoint: dict[str, Any] = {"enable": False}
    if plant in saves:
        checkpoint = {"interval": HANGS_IN_STEP, "save_timeout_seconds": saves[plant]}
    job = make_job(
        folder,
        steps=2 * HANGS_IN_STEP,
        comm={"train_timeout_seconds": LIMIT_S},
        metrics={"log_freq": 100},  # A logged step sums more numbers.
        parallelism={"expert_parallel_degree": 2},
        checkpoint=checkpoint,
    )
    if dist.get_rank() == 1:
        PLANTS[plant]()
    process = process_here()
    reports, save_limit = folder / "comm_traces", job.checkpoint.save_timeout_seconds
    with hangs.HangWatch(process, job.comm, save_limit, reports, None):
        train(job, model_of_job(job.model), process)


def _sleep(*args: object, **options: object) -> None:
    time.sleep(_FOR_EVER)


def _in_a_layer() -> None:
    forward = ExpertOutputs.forward

    def patched(self, *args):
        place = POSITION.last()
        if (place.step, place.layer) == (HANGS_IN_STEP, "layer 2"):
            _sleep()
        return forward(self, *args)

    ExpertOutputs.forward = patched  # type: ignore[method-assign]


def _write_slowly() -> None:
    """A save takes twice as long as a collective of training may."""
    write = FolderWriter.write_data

    def write_slowly(*args):
        time.sleep(2 * LIMIT_S)
        return write(*args)

    FolderWriter.write_data = write_slowly  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    "in a layer": _in_a_layer,
    "loader": lambda: replace_call(StepReader, "read_step", HANGS_IN_STEP, _sleep),
    "writer": lambda: setattr(FolderWriter, "write_data", _sleep),
    "slow writer": _write_slowly,
    # One rank leaves out the step's all-reduce.
    "other branch": lambda: replace_call(
        train_step, "sum_over_world", HANGS_IN_STEP, lambda _, terms: terms
    ),
}


SAYS = {
    "loader": "rank 0 waits in the step (all_gather, all ranks, 1 of 2 there); rank 1 is in the "
    "loader (titan_moe/data/loader.py:",
    "other branch": "step 3: ranks went different ways: rank 0 called all_reduce of 29 Double in "
    "the gradient norm of step 3 where rank 1 called all_gather of 64 Float in the step of step 4",
}


@pytest.mark.parametrize("plant", split(SAYS, ["loader"]))
def test_hang_report_names_waiting_ranks(tmp_path: Path, plant: str) -> None:
    lines = hang(tmp_path, plant)
    assert SAYS[plant] in lines[0], lines


@pytest.mark.slow
def test_save_past_its_limit_names_the_key(tmp_path: Path) -> None:
    lines = hang(tmp_path, "writer")
    assert "rank 1 is saving a checkpoint (titan_moe/checkpoint/checkpointer.py:" in lines[0]
    assert lines[-1] == "if the disk is only slow, raise checkpoint.save_timeout_seconds"


@pytest.mark.slow
def test_save_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    run_on_ranks(train_watched, 2, tmp_path, "slow writer")
    assert (tmp_path / "checkpoint" / "step-6" / "manifest.json").is_file()
    assert not (tmp_path / "comm_traces").exists()


@pytest.mark.slow
def test_hang_report_names_groups_and_layers(tmp_path: Path) -> None:
    # The call that has waited longest comes first: which one that is, is a matter of chance.
    lines = hang(tmp_path, "in a layer", world_size=4)
    others, first = sorted(lines, key=lambda line: "combine" in line)
    assert "ranks 2-3 wait in layer 3 (all_gather, all ranks, 2 of 4 there); rank 1 " in others
    assert others.endswith("; rank 0 waits elsewhere")
    assert "rank 0 waits in layer 2's combine (all_to_all, ep group 0-1, 1 of 2" in first
    assert "; rank 1 is in layer 2's experts (titan_moe/moe/layer.py:" in first
