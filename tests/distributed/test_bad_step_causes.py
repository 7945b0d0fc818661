"""A value that only one rank has and that is not finite: all see it, and its place."""

import pytest
import torch
import torch.distributed as dist

from tests.support.tiers import tiered
from tests.support.tiny import batch_of, make_job, tiny_step
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training import train_step as module
from titan_moe.training.bad_step_causes import _GRADIENT, _PARAMETER, _first_place, _in_tensors

NAMES = ["a", "b", "c"]


def first_places() -> tuple[str, str, str]:
    """Rank 0 holds a and a bad c, rank 1 a bad b."""
    held = ({"a": 1.0, "c": torch.inf}, {"b": torch.nan})[dist.get_rank()]
    tensors = {name: torch.full((2,), value) for name, value in held.items()}
    forwards = _first_place(_in_tensors(_PARAMETER, tensors, NAMES))
    backwards = _first_place(_in_tensors(_GRADIENT, tensors, NAMES[::-1]))
    return forwards, backwards, _first_place([])


def test_first_place_of_all_ranks_is_named():
    expected = (
        "first seen in the parameter b",
        "first seen in the gradient of c",
        "every tensor is finite by itself: a sum over them overflowed",
    )
    assert run_on_ranks(first_places, 2) == [expected] * 2


def nan_in_one_gradient(job: JobConfig, bad_rank: int) -> bool:
    """Returns whether a step is finite with a NaN in one rank's piece of one gradient."""
    total = module.grad_norm.sum_of_squares

    def poison(parameters, *rest):
        if dist.get_rank() == bad_rank:
            module.grad_norm.local_grads(parameters)[-1].flatten()[0] = float("nan")
        return total(parameters, *rest)

    module.grad_norm.sum_of_squares = poison
    _, step = tiny_step(job)
    return step([batch_of(0, slice(1))]).finite


@pytest.mark.parametrize("bad_rank", tiered([1], slow=[0]))
def test_a_nan_on_one_rank_is_seen_by_all(bad_rank: int):
    job = make_job("deepseek_v3", parallelism={"expert_parallel_degree": 2})
    assert run_on_ranks(nan_in_one_gradient, 2, job, bad_rank) == [False, False]
    assert run_on_ranks(nan_in_one_gradient, 2, job, -1) == [True, True]
