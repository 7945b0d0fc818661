"""Layers are compiled once, whatever the routing; the gate compares what they train."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.support.tiers import tiered
from tests.support.tiny import batch_of, make_job, tiny_step
from titan_moe.config.job_config import JobConfig
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.runtime.ranks import run_on_ranks

STEPS = 6


def _noting(receive: Callable[..., ExpertRows], sizes: set[int], *args: Any) -> ExpertRows:
    rows = receive(*args)
    sizes.add(len(rows.x_RD))
    return rows


def train(job: JobConfig) -> tuple[list[int], set[int]]:
    """Returns the graphs compiled after each step, and the numbers of rows that experts got."""
    sharded, step = tiny_step(job)
    sizes: set[int] = set()
    for moe in sharded.moe_layers().values():
        moe.dispatcher.receive = partial(_noting, moe.dispatcher.receive, sizes)
    graphs = []
    for number in range(STEPS):
        batch = batch_of(number, slice(dist.get_rank(), 4, dist.get_world_size()))
        step([batch], logged=number % 2 == 0)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs, sizes


def job_of(ep: int, **parallelism: Any) -> JobConfig:
    training = {"dtype": "float64", "mixed_precision_param": "float32"}
    return make_job(
        "qwen3",
        training={**training, "local_batch_size": 4 // ep},
        parallelism={"expert_parallel_degree": ep, **parallelism},
        compile={"enable": True, "backend": "aot_eager"},
    )


@pytest.mark.parametrize("ep", tiered([], slow=[2], full=[1]))
def test_nothing_is_compiled_after_the_first_step(ep: int):
    for graphs, sizes in run_on_ranks(train, ep, job_of(ep)):
        assert 0 < graphs[0] == graphs[-1]
        assert ep == 1 or len(sizes) > 2, "the number of rows did not vary"


def graph_breaks(job: JobConfig) -> list[str]:
    train(job)
    # The hooks of FSDP's unit of experts, inside of a layer, break its graph too.
    return [each for each in counters["graph_break"] if "function `disable`" not in each]


@pytest.mark.slow
def test_no_exchange_in_bounded_buffers_breaks_a_graph():
    bounded = {"expert_parallel_capacity_factor": 2.0}
    assert run_on_ranks(graph_breaks, 2, job_of(2, **bounded)) == [[], []]
    assert all(run_on_ranks(graph_breaks, 2, job_of(2))), "the standard exchange breaks it"
