"""A loss or gradient that is not finite is named, and costs nothing that was good."""

import json
from pathlib import Path

import pytest

from tests.support.tiers import tiered
from tests.support.trainings import checksums, figures, make_job, train_here
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import RankError, run_on_ranks

BAD_STEP = 7


def poisoned(job: JobConfig, where: str):
    """Train, with a NaN on rank 1 in one step only."""
    import torch
    import torch.distributed as dist

    from titan_moe import train_step
    from titan_moe.models.output import Output
    from titan_moe.moe.experts import Experts

    steps = iter(range(1, 100))
    step = train_step.TrainStep.__call__
    now = [0]

    def counted(self, batches, **more):
        now[0] = next(steps)
        return step(self, batches, **more)

    train_step.TrainStep.__call__ = counted
    bad = dist.get_rank() == 1
    if where == "forward":
        forward = Experts.forward

        def broken(self, rows):
            y_RD = forward(self, rows)
            return y_RD * float("nan") if bad and now[0] == BAD_STEP else y_RD

        Experts.forward = broken
    else:
        loss = Output.forward

        def broken_gradient(self, *args):
            value = loss(self, *args)
            if bad and now[0] == BAD_STEP and torch.is_grad_enabled():
                value.register_hook(lambda grad: grad * float("inf"))
            return value

        Output.forward = broken_gradient
    train_here(job)


EP2, PP2 = {"expert_parallel_degree": 2}, {"pipeline_parallel_degree": 2}


@pytest.mark.parametrize(
    "where, place, parallelism",
    tiered(
        [],
        slow=[
            ("forward", "output of layers.1.moe.experts on rank 1", EP2),
            ("gradient", "gradient of output.weight", EP2),
        ],
        full=[("forward", "output of layers.2.moe.experts on rank 1", PP2)],
    ),
)
def test_a_run_stops_with_the_state_before_the_bad_step(
    tmp_path: Path, where: str, place: str, parallelism: dict[str, int]
):
    job = make_job(tmp_path, parallelism=parallelism)
    with pytest.raises(RankError) as failure:
        run_on_ranks(poisoned, 2, job, where)
    message = str(failure.value)
    assert f"step {BAD_STEP}: " in message
    assert place in message
    assert "synthetic/" in message, "the documents of the batch are named"
    kept = json.loads((tmp_path / f"checkpoint/step-{BAD_STEP - 1}/train_state.json").read_text())
    assert kept["common"]["step"] == BAD_STEP - 1

    # Going on from there without the fault is the run that never had it.
    run_on_ranks(train_here, 2, job)
    healthy = tmp_path / "healthy"
    run_on_ranks(train_here, 2, make_job(healthy, parallelism=parallelism))
    assert figures(tmp_path) == figures(healthy)
    assert checksums(tmp_path) == checksums(healthy)


def saved(folder: Path, step: int) -> dict:
    return json.loads((folder / f"checkpoint/step-{step}/manifest.json").read_text())["checksums"]


@pytest.mark.slow
def test_a_bad_step_can_be_skipped(tmp_path: Path):
    every_step = {"enable": True, "interval": 1, "keep_latest_k": 0}
    job = make_job(tmp_path, training={"on_nonfinite": "skip"}, checkpoint=every_step)
    run_on_ranks(poisoned, 2, job, "forward")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert losses[BAD_STEP - 1] is None
    before, after = (saved(tmp_path, step) for step in (BAD_STEP - 1, BAD_STEP))
    assert before == after, "no parameter, moment, bias or load has moved"
    assert all(loss is not None for loss in losses[:6] + losses[7:])
    assert losses[-1] < losses[0]
