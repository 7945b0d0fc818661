"""Layers are compiled once, whatever the routing; the gate compares what they train."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.support.tiers import tiered
from tests.support.tiny import batch_of, make_job, tiny_step
from titan_moe.config.job_config import JobConfig
from titan_moe.distributed import compile
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.runtime.ranks import run_on_ranks

STEPS = 6


def _noting(receive: Callable[..., ExpertRows], sizes: set[int], *args: Any) -> ExpertRows:
    rows = receive(*args)
    sizes.add(len(rows.x_RD))
    return rows


def train(job: JobConfig, once: bool = False) -> tuple[list[int], set[int]]:
    """Returns the graphs compiled after each step, and the numbers of rows that experts got. With
    `once` an error if a piece is compiled twice; layers that are one graph may differ."""
    torch._dynamo.config.error_on_recompile = once
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
    for graphs, sizes in run_on_ranks(train, ep, job_of(ep), ep > 1):
        assert 0 < graphs[0] == graphs[-1]
        assert ep == 1 or len(sizes) > 2, "the number of rows did not vary"


def unknown_sizes(job: JobConfig) -> list[list[bool]]:
    """Trains one step, and returns for each stack of weights that a graph is given which of a
    matrix's sizes the graph does not know."""
    stacks: list[list[bool]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        for node in graph.graph.find_nodes(op="placeholder"):
            x = node.meta["example_value"]
            if isinstance(x, torch.Tensor) and x.ndim == 3 and x.requires_grad:
                stacks.append([isinstance(size, torch.SymInt) for size in x.shape[1:]])
        return graph.forward

    with mock.patch.object(compile, "_options", lambda *_: {"backend": backend}):
        _, step = tiny_step(job)
        step([batch_of(0, slice(dist.get_rank(), 4, dist.get_world_size()))])
    return stacks


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [{}, {"expert_parallel_comm_backend": "balanced"}])
def test_graphs_of_experts_know_the_sizes_of_their_matrices(parallelism: dict[str, Any]):
    """Kernels for any size divide 64-bit numbers for each element, and load one at a time."""
    for stacks in run_on_ranks(unknown_sizes, 2, job_of(2, **parallelism)):
        assert len(stacks) >= 3 and not any(map(any, stacks)), stacks


def graph_breaks(job: JobConfig) -> list[str]:
    train(job)
    # The hooks of FSDP's unit of experts, inside of a layer, break its graph too.
    return [each for each in counters["graph_break"] if "function `disable`" not in each]


@pytest.mark.slow
def test_no_exchange_in_bounded_buffers_breaks_a_graph():
    bounded = {"expert_parallel_capacity_factor": 2.0}
    assert run_on_ranks(graph_breaks, 2, job_of(2, **bounded)) == [[], []]
    assert all(run_on_ranks(graph_breaks, 2, job_of(2))), "the standard exchange breaks it"
