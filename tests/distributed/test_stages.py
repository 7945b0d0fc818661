"""Training stages: the bits of runs that were stopped where a stage begins, and resumed in it."""

import json
import os
import shutil
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import tiered
from tests.support.trainings import checksums, figures, make_job, train_here
from titan_moe.checkpoint.tensors import FolderWriter
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.ranks import RankError, run_on_ranks
from titan_moe.training import trainer

STEPS = 8
# From data parallelism to longer and more sequences that two ranks share; on to tensor parallelism;
# and to still longer sequences, for which nothing moves.
STAGES = [
    {
        "from_step": 3,
        "seq_len": 64,
        "global_batch_size": 12,
        "parallelism": {"context_parallel_degree": 2, "expert_parallel_degree": 2},
    },
    {"from_step": 5, "parallelism": {"context_parallel_degree": 1, "tensor_parallel_degree": 2}},
    {"from_step": 6, "seq_len": 96},
]


def staged_job(folder: Path, stages: list[dict[str, Any]] = STAGES) -> JobConfig:
    job = make_job(
        folder,
        steps=STEPS,
        training={"dtype": "float64", "seq_len": 32, "local_batch_size": 4},
        checkpoint={"enable": True, "interval": 2},
        validation={"enable": True, "freq": 4, "steps": 2, "local_batch_size": 2},
    )
    return JobConfig.model_validate(job.model_dump() | {"stages": stages})


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never stops."""
    folder = tmp_path_factory.mktemp("live")
    run_on_ranks(train_here, 2, staged_job(folder))
    return folder


def saved(folder: Path, step: int) -> dict[str, Any]:
    """Returns a checkpoint's checksums of all tensors, and its state with the data position."""
    state = folder / f"checkpoint/step-{step}/train_state.json"
    return {"checksums": checksums(folder, step), "state": json.loads(state.read_text())}


@pytest.mark.parametrize("step", tiered([6], slow=[2, 4]))
def test_a_run_that_stopped_goes_on_as_the_one_that_did_not(
    tmp_path: Path, live: Path, step: int
) -> None:
    """The run stops before the first and the second stage, and inside of the last one."""
    name = f"checkpoint/step-{step}"
    shutil.copytree(live / name, tmp_path / name)
    run_on_ranks(train_here, 2, staged_job(tmp_path))
    assert figures(tmp_path) == figures(live)[step:]
    assert saved(tmp_path, STEPS) == saved(live, STEPS)


def test_figures_are_of_the_stage_that_a_step_is_in(live: Path) -> None:
    facts = json.loads((live / "run.json").read_text())
    assert facts["tokens_per_step"] == 8 * 32 and facts["data"]["seq_len"] == 32
    assert facts["layout"]["dp_shard"] == 2 and facts["layout"]["ep"] == 1
    found = [
        (each["from_step"], each["tokens_per_step"], each["layout"]["cp"], each["layout"]["tp"])
        for each in facts["stages"]
    ]
    assert found == [(3, 12 * 64, 2, 1), (5, 12 * 64, 1, 2), (6, 12 * 96, 1, 2)]
    lines = read_json_lines(live / "metrics.jsonl")
    per_step = [8 * 32] * 2 + [12 * 64] * 3 + [12 * 96] * 3
    assert [line["tokens"] for line in lines] == list(accumulate(per_step))
    assert [line["step"] for line in lines if "time/reshard" in line] == [3, 5, 6]
    # Longer sequences: a token sees more others.
    flops = [line["tflops_per_device"] / line["tokens_per_second"] for line in lines]
    assert flops[2] == pytest.approx(flops[4]) and flops[5] == pytest.approx(flops[7])
    assert flops[5] > 1.001 * flops[4] > 1.001 * flops[0]
    assert load_job(["--config", str(live / "config.toml")]) == staged_job(live)


def order_with_a_slow_first_save(job: JobConfig) -> list[str]:
    """Trains, and returns the order in which a rank ended its writes and moved its tensors."""
    write, move, delays, order = FolderWriter.write_data, trainer.move, iter([3.0]), []

    def slow_write(*args: Any) -> Any:
        time.sleep(next(delays, 0))
        order.append("written")
        return write(*args)

    def logged_move(*args: Any) -> int:
        order.append("moved")
        return move(*args)

    FolderWriter.write_data = slow_write  # type: ignore[method-assign]
    trainer.move = logged_move
    train_here(job)
    return order


@pytest.mark.slow
def test_a_change_of_layout_waits_for_the_save_in_the_background(
    tmp_path: Path, live: Path
) -> None:
    tables = staged_job(tmp_path, stages=STAGES[:1]).model_dump()
    tables["training"]["steps"] = 3
    tables["checkpoint"]["async_mode"] = "async"
    found = run_on_ranks(order_with_a_slow_first_save, 2, JobConfig.model_validate(tables))
    assert found == [["written", "moved", "moved", "written"]] * 2
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-2", "step-3"]
    assert saved(tmp_path, 2) == saved(live, 2)


def test_a_stage_that_the_run_did_not_have_is_refused(tmp_path: Path, live: Path) -> None:
    """The data position is of 96 tokens, which no stage has any more."""
    name = "checkpoint/step-6"
    shutil.copytree(live / name, tmp_path / name)
    job = staged_job(tmp_path, stages=STAGES[:2])
    line = "was taken with seq_len=96, this run has seq_len=64: set it as it was"
    with pytest.raises(RankError, match=line):
        run_on_ranks(train_here, 2, job)
