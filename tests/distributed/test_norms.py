"""A NaN that only one rank has."""

import pytest
import torch.distributed as dist

from tests.support.tiers import tiered
from tests.support.tiny import batch_of, make_job, tiny_step
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training import train_step as module


def nan_in_one_gradient(job: JobConfig, bad_rank: int) -> bool:
    """Returns whether a step is finite with a NaN in one rank's piece of one gradient."""
    total = module.grad_norm.sum_of_squares

    def poison(parameters, ranks_per_stage):
        if dist.get_rank() == bad_rank:
            module.grad_norm.local_grads(parameters)[-1].flatten()[0] = float("nan")
        return total(parameters, ranks_per_stage)

    module.grad_norm.sum_of_squares = poison
    _, step = tiny_step(job)
    return step([batch_of(0, slice(1))]).finite


@pytest.mark.parametrize("bad_rank", tiered([1], slow=[0]))
def test_a_nan_on_one_rank_is_seen_by_all(bad_rank: int):
    job = make_job("deepseek_v3", parallelism={"expert_parallel_degree": 2})
    assert run_on_ranks(nan_in_one_gradient, 2, job, bad_rank) == [False, False]
    assert run_on_ranks(nan_in_one_gradient, 2, job, -1) == [True, True]
