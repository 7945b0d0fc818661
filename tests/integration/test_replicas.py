"""Replicas are compared while a run goes on; bits that differ stop it."""

from pathlib import Path

import pytest

from tests.support.tiers import tiered
from tests.support.trainings import figures, make_job, train_here
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import RankError, run_on_ranks

_REPLICATED = {"data_parallel_replicate_degree": 2}


def flipped(job: JobConfig, where: str):
    """Train; a bit flips in the memory of rank 1 in step 3."""
    import torch
    import torch.distributed as dist

    from titan_moe.checkpoint.tensors import model_tensors, optimizer_tensors
    from titan_moe.distributed.dtensor import local_part
    from titan_moe.training.train_step import TrainStep

    steps = iter(range(1, 100))
    step = TrainStep.__call__

    def flip(self, batches, **more):
        result = step(self, batches, **more)
        if next(steps) == 3 and dist.get_rank() == 1:
            parts = self._sharded.parts
            tensors = model_tensors(parts) | optimizer_tensors(parts, self._optimizer)
            local_part(tensors[where]).view(torch.uint8).view(-1)[0] ^= 1
        return result

    TrainStep.__call__ = flip
    train_here(job)


@pytest.mark.parametrize(
    "where",
    tiered(
        ["model.layers.1.moe.router.gate.weight"], slow=["optimizer.tok_embeddings.weight.exp_avg"]
    ),
)
def test_a_flipped_bit_is_named(tmp_path: Path, where: str):
    job = make_job(
        tmp_path,
        parallelism=_REPLICATED,
        metrics={"replica_check_freq": 2},
        checkpoint={"enable": True, "interval": 4},
    )
    with pytest.raises(RankError) as failure:
        run_on_ranks(flipped, 2, job, where)
    message = str(failure.value)
    assert "after step 4 ranks hold different values of what should be replicas" in message
    assert f"{where} (rank 0 unlike rank 1)" in message
    assert not (tmp_path / "checkpoint/step-4").exists()


@pytest.mark.slow
def test_comparing_changes_nothing(tmp_path: Path):
    run_on_ranks(train_here, 2, make_job(tmp_path / "plain", parallelism=_REPLICATED))
    each = {"parallelism": _REPLICATED, "metrics": {"replica_check_freq": 1}}
    run_on_ranks(train_here, 2, make_job(tmp_path / "watched", **each))
    assert figures(tmp_path / "watched") == figures(tmp_path / "plain")
