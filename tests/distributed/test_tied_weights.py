"""Copies of one parameter: their gradients are summed over all of them, and they stay alike."""

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.trainings import make_job, train_here
from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import RankError, run_on_ranks


def job_of(folder: Path):
    return make_job(
        folder,
        steps=4,
        dtype="bfloat16",
        model={"name": "qwen3", "flavor": "gate"},
        training={"local_batch_size": 4},
        parallelism={"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
        checkpoint={"interval": 4},
    )


def first_uses(job: JobConfig) -> dict[tuple[int, ...], str]:
    """For each group with a batch of sends and receives, what made this rank's communicator."""
    first: dict[tuple[int, ...], str] = {}
    mixed: set[tuple[int, ...]] = set()
    batch, all_reduce = dist.batch_isend_irecv, dist.all_reduce

    def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(group))

    def batched(ops: list[dist.P2POp]) -> list[dist.Work]:
        mixed.add(ranks := ranks_of(ops[0].group))
        first.setdefault(ranks, "batch")
        return batch(ops)

    def all_reduced(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        first.setdefault(ranks_of(group), "all-reduce")
        return all_reduce(tensor, op, group, async_op)

    with (
        mock.patch.object(dist, "batch_isend_irecv", batched),
        mock.patch.object(dist, "all_reduce", all_reduced),
    ):
        train_here(job)
    return {ranks: first[ranks] for ranks in mixed}


def test_all_ranks_make_a_pipelines_communicator_before_two_of_them_use_it(tmp_path: Path):
    job = make_job(
        tmp_path,
        steps=1,
        model={"name": "qwen3", "flavor": "gate"},
        training={"local_batch_size": 4, "global_batch_size": 4},
        parallelism={
            "pipeline_parallel_degree": 3,
            "pipeline_parallel_schedule": "GPipe",
        },
        checkpoint={"enable": False},
    )
    found = run_on_ranks(first_uses, 3, job)
    assert found == [{(0, 1, 2): "all-reduce"}, {}, {(0, 1, 2): "all-reduce"}]


def train_untied(job) -> None:
    from titan_moe import train_step

    train_step.sum_tied_grads = lambda *_: None
    train_here(job)


@pytest.mark.slow
def test_copies_on_two_stages_stay_the_same_bits_in_bfloat16(tmp_path: Path):
    run_on_ranks(train_here, 4, job_of(tmp_path))
    sums = read_manifest(tmp_path / "checkpoint" / "step-4").checksums
    assert sums["model.output.weight"] == sums["model.tok_embeddings.weight"]


@pytest.mark.slow
def test_copies_that_drifted_are_not_saved(tmp_path: Path):
    with pytest.raises(RankError) as failed:
        run_on_ranks(train_untied, 4, job_of(tmp_path))
    assert "tok_embeddings.weight and its copies output.weight are not the same" in str(
        failed.value
    )
    assert not (tmp_path / "checkpoint" / "step-4").exists()
