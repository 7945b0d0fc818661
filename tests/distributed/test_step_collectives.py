"""A step sends one all-reduce besides tokens and gradients."""

import torch.distributed as dist

from tests.support.tiny import batch_of, make_job, tiny_step
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import run_on_ranks

STEPS = {
    "not logged": {"logged": False},
    "logged": {"logged": True},
    "norms": {"logged": True, "parameter_norms": True},
}


def collectives_by_step(job: JobConfig) -> dict[str, list[str]]:
    """The collectives over the world, by kind of step, and the result's figures."""
    _, step = tiny_step(job)
    batches = [batch_of(0, slice(2))] * 2
    names: list[str] = []

    def counted(function):
        def call(*args, **kwargs):
            if kwargs.get("group") in (None, dist.group.WORLD):
                names.append(function.__name__)
            return function(*args, **kwargs)

        return call

    for name in ("all_reduce", "broadcast", "all_gather_object", "all_gather", "barrier"):
        setattr(dist, name, counted(getattr(dist, name)))
    found = {}
    for kind, asked in STEPS.items():
        names.clear()
        result = step(batches, **asked)
        found[kind] = list(names)
        assert result.finite and result.counts_LE is not None
        assert (result.metrics is not None) == asked["logged"]
        assert not asked["logged"] or {"data", "balance_loss"} <= result.metrics.keys()
        assert (result.parameter_norms is not None) == ("parameter_norms" in asked)
    return found


def test_a_step_is_one_all_reduce():
    parallelism = {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}
    job = make_job("deepseek_v3", parallelism=parallelism)
    expected = {step: ["all_reduce"] for step in STEPS}
    assert run_on_ranks(collectives_by_step, 2, job) == [expected] * 2


def figures(job: JobConfig, logged: bool) -> list[float]:
    """Losses and norms of three steps, every one logged or none."""
    _, step = tiny_step(job)
    numbers = []
    for last in (False, False, True):
        result = step([batch_of(0, slice(2))], logged=logged or last)
        numbers += [result.loss, result.grad_norm]
    return [*numbers, result.metrics["balance_loss"]]


def test_whether_a_step_is_logged_changes_nothing():
    """The layers' sums start again from zero after each step, logged or not."""
    job = make_job("deepseek_v3")
    assert run_on_ranks(figures, 1, job, True) == run_on_ranks(figures, 1, job, False)
