"""Compiled layers train the same model, and nothing is compiled again as routing varies."""

from typing import Any

import pytest
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.support.tiers import tiered
from tests.support.tiny import batch_of, make_job, tiny_step
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import run_on_ranks

STEPS = 6


def train(job: JobConfig) -> tuple[list[int], list[float], list[set]]:
    """Graphs compiled after each step, losses, and the numbers of rows that experts got."""
    sharded, step = tiny_step(job)
    sizes: set[int] = set()
    for moe in sharded.moe_layers().values():
        moe.experts.register_forward_pre_hook(lambda _, args: sizes.add(len(args[0].x_RD)))
    graphs, losses = [], []
    for number in range(STEPS):
        rows = slice(dist.get_rank(), 4, dist.get_world_size())
        losses.append(step([batch_of(number, rows)]).loss)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs, losses, sizes


def job_of(ep: int, backend: str | None, dtype: str = "float64", **parallelism: Any) -> JobConfig:
    return make_job(
        "qwen3",
        training={"dtype": dtype, "mixed_precision_param": "float32", "local_batch_size": 4 // ep},
        parallelism={"expert_parallel_degree": ep, **parallelism},
        compile={"enable": backend is not None, "backend": backend or "eager"},
    )


@pytest.mark.parametrize("ep", tiered([], slow=[2], full=[1]))
def test_nothing_is_compiled_after_the_second_step(ep: int):
    eager = run_on_ranks(train, ep, job_of(ep, None))
    for (graphs, losses, sizes), (none, expected, _) in zip(
        run_on_ranks(train, ep, job_of(ep, "aot_eager")), eager, strict=True
    ):
        assert 0 < graphs[1] == graphs[-1] and none[-1] == 0
        assert losses == pytest.approx(expected, rel=1e-12)
        assert ep == 1 or len(sizes) > 2, "the number of rows did not vary"


def graph_breaks(job: JobConfig) -> list[str]:
    train(job)
    return list(counters["graph_break"])


@pytest.mark.slow
def test_layer_is_one_graph_where_nothing_waits():
    bounded = {"expert_parallel_capacity_factor": 2.0}
    assert run_on_ranks(graph_breaks, 2, job_of(2, "aot_eager", **bounded)) == [[], []]
    assert all(run_on_ranks(graph_breaks, 2, job_of(2, "aot_eager")))


@pytest.mark.full
def test_generated_kernels_train_alike():
    ((graphs, losses, _),) = run_on_ranks(train, 1, job_of(1, "inductor", "float32"))
    ((_, expected, _),) = run_on_ranks(train, 1, job_of(1, None, "float32"))
    assert graphs[1] == graphs[-1] and losses == pytest.approx(expected, rel=1e-4)
