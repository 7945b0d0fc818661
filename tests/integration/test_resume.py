"""A run that stops and goes on is the run that never stopped: the same bits."""

from functools import partial
from pathlib import Path

import pytest

from tests.support import trainings
from tests.support.saved_runs import names
from tests.support.tiers import tiered
from tests.support.trainings import assert_same_run, figures, train_here
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import RankError, run_on_ranks

EP2 = {"expert_parallel_degree": 2}
STEPS = 8


def make_job(folder: Path, *, steps: int = STEPS, **tables) -> JobConfig:
    """A run of few steps that is saved after every second one."""
    checkpoint = {"interval": 2, **tables.pop("checkpoint", {})}
    return trainings.make_job(folder, steps=steps, checkpoint=checkpoint, **tables)


@pytest.mark.parametrize(
    "world_size, dtype, optimizer",
    tiered(
        [],
        slow=[
            (1, "float32", {}),
            (2, "bfloat16", {}),
            (2, "float32", {"name": "Muon", "state_dtype": "bfloat16"}),
        ],
        full=[(1, "bfloat16", {}), (2, "float32", {}), (2, "float32", {"name": "Muon"})],
    ),
)
def test_four_steps_and_four_more_are_eight(
    tmp_path: Path, world_size: int, dtype: str, optimizer: dict[str, str]
):
    parallelism = {"expert_parallel_degree": world_size}
    tables = {"dtype": dtype, "parallelism": parallelism, "optimizer": optimizer}
    run_on_ranks(train_here, world_size, make_job(tmp_path / "whole", **tables))
    run_on_ranks(train_here, world_size, make_job(tmp_path / "halves", steps=4, **tables))
    disturbed = partial(train_here, disturb=True)
    run_on_ranks(disturbed, world_size, make_job(tmp_path / "halves", **tables))
    assert_same_run(tmp_path / "halves", tmp_path / "whole", STEPS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_on_ranks(train_here, 2, make_job(folder, parallelism=EP2))
    return folder


@pytest.mark.parametrize(
    "where, rank, mode",
    tiered(
        [("before the rename", 0, "disabled")],
        slow=[(where, 1, "disabled") for where in ("writing tensors", "in a step")]
        + [("writing tensors", 1, "async")],
    ),
)
def test_a_killed_rank_costs_steps_but_changes_nothing(
    tmp_path: Path, undisturbed: Path, where: str, rank: int, mode: str
):
    job = make_job(tmp_path, parallelism=EP2, checkpoint={"async_mode": mode})
    with pytest.raises(RankError):
        run_on_ranks(partial(train_here, kill=(where, rank)), 2, job)
    # It was killed, and where it should be: between the saves of steps 4 and 6.
    begun = [".step-6.writing"] * (where != "in a step")
    assert names(tmp_path) == [*begun, "step-2", "step-4"]
    run_on_ranks(train_here, 2, job)
    assert_same_run(tmp_path, undisturbed, STEPS)
    assert not (tmp_path / "checkpoint/.step-6.writing").exists()


def asked(job: JobConfig, rank: int, step: int) -> bool:
    """Train with a rank whose launcher leaves a request during a step."""
    import torch.distributed as dist

    from titan_moe.runtime.stopping import StopRequest

    steps = iter(range(1, STEPS + 1))
    if dist.get_rank() == rank:
        StopRequest.asks = lambda self: next(steps) >= step
    return train_here(job)


def test_all_ranks_stop_after_the_step_in_which_one_asks(tmp_path: Path, undisturbed: Path):
    job = make_job(tmp_path, parallelism=EP2)
    assert run_on_ranks(asked, 2, job, 1, 3) == [True, True]
    assert [line[0] for line in figures(tmp_path)] == [1, 2, 3]
    assert names(tmp_path) == ["step-2", "step-3"]
    assert run_on_ranks(train_here, 2, job) == [False, False]
    assert_same_run(tmp_path, undisturbed, STEPS)


def stopped_at_a_save(job: JobConfig) -> tuple[bool, list[str]]:
    stopped = asked(job, 0, 2)
    return stopped, names(Path(job.job.dump_folder))


def test_a_run_stops_when_its_save_in_the_background_is_complete(tmp_path: Path):
    job = make_job(tmp_path, checkpoint={"async_mode": "async"})
    assert run_on_ranks(stopped_at_a_save, 1, job) == [(True, ["step-2"])]


@pytest.mark.slow
def test_a_request_in_the_last_step_or_without_checkpoints_changes_nothing(tmp_path: Path):
    assert run_on_ranks(asked, 1, make_job(tmp_path / "last"), 0, STEPS) == [False]
    job = make_job(tmp_path / "none", checkpoint={"enable": False})
    assert run_on_ranks(asked, 1, job, 0, 1) == [False]
