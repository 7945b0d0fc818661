"""A fake rank's step sends what a rank's step among gloo's sends, byte by byte."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.tiers import tiered
from tests.support.tiny import tiny_step
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job, resolve
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.simulate.comm_counter import CommCounter, Flow, Volume, axes_of_groups
from titan_moe.simulate.fake_rank import (
    FakeRank,
    balance_routers,
    empty_batch,
    fake_world,
    microbatches_to_run,
)
from titan_moe.verify.layouts.layouts import apply_layout, parse

MICROBATCHES = 4
LAYOUTS = [
    "dp_shard=2,ep=2,accumulation=keep_gathered",
    "pp=2,dp_shard=2,ep=2",
    "dp_shard=2,tp=2,ep=4,recompute=full",
    "dp_replicate=2,dp_shard=2,ep=2,recompute=op,accumulation=keep_gathered",
    "cp=2,tp=2,ep=2,etp=2,cp_method=ring",
    "dp_shard=2,cp=2,ep=4,cp_method=ulysses,reshard=always",
]
Sent = dict[Flow, Volume]


def make_job(layout: str) -> JobConfig:
    parsed = parse(layout)
    job = load_job(["--job.config_file", "configs/debug/gate_deepseek_v3.toml"])
    # Every rank's tokens divide by the number of experts: all experts get as many.
    training = {"seq_len": 64, "local_batch_size": 4, "global_batch_size": -1}
    training |= {"loss_chunk_size": 64}  # A fake step takes a time of its number of operations.
    # The stages of `layouts` are those of a model of fewer layers.
    tables = {"training": training, "parallelism": {"module_fqns_per_model_part": None}}
    return resolve(apply_layout(job, parsed, tables), parsed.world_size)


def _sent_thrice(dispatcher: Any, y_RD: Tensor, route: Any) -> Any:
    send_home = type(dispatcher).send_home
    for _ in range(2):  # The backward's exchanges are not repeated.
        send_home(dispatcher, y_RD, route).handle.wait()
    return send_home(dispatcher, y_RD, route)


def train_on_gloo(job: JobConfig, planted: bool = False) -> Sent:
    sharded, train_step = tiny_step(job, model_of_job(job.model))
    balance_routers(sharded)
    if planted:
        for moe in sharded.moe_layers().values():
            moe.dispatcher.send_home = partial(_sent_thrice, moe.dispatcher)
    counter = CommCounter()
    with counter:
        counter.groups = axes_of_groups(sharded.meshes)
        train_step([empty_batch(job)] * MICROBATCHES)
    return counter.volumes()


def train_fake_rank(job: JobConfig, world_size: int, rank: int) -> Sent:
    """Returns the bytes that four microbatches send, extrapolated from fewer."""
    torch.set_num_threads(1)
    with fake_world(rank, world_size):
        fake = FakeRank(job, model_of_job(job.model))
        return fake.step(microbatches_to_run(job.parallelism)).of(MICROBATCHES)


@pytest.mark.parametrize("layout", tiered([], slow=LAYOUTS[:2], full=LAYOUTS[2:]))
def test_a_fake_rank_sends_what_a_real_one_sends(layout: str) -> None:
    job, world_size = make_job(layout), parse(layout).world_size
    on_gloo = run_on_ranks(train_on_gloo, world_size, job)
    for rank in (0, world_size - 1):
        tasks = [(job, world_size, rank)]
        ((_, sent),) = in_fresh_processes(train_fake_rank, tasks, num_workers=1)
        assert sent == on_gloo[rank]
        assert sum(volume.bytes for volume in sent.values()) > 0


@pytest.mark.slow
def test_rows_that_are_sent_thrice_are_seen() -> None:
    layout = "dp_shard=2,ep=2"
    first, second = (run_on_ranks(train_on_gloo, 2, make_job(layout), bug) for bug in (False, True))
    (ep,) = (flow for flow in first[0] if flow.axis.startswith("ep") and flow.op == "all_to_all")
    assert second[0][ep].bytes > 1.3 * first[0][ep].bytes


def send_known_bytes() -> Sent:
    world, counter = dist.group.WORLD, CommCounter()
    assert world is not None
    x, name = torch.zeros(12, dtype=torch.float32), world.group_name
    later = dist.new_group([0, 1, 2], group_desc="fsdp,tp")
    functional = torch.ops._c10d_functional
    with counter:
        counter.groups = {name: "world"}
        dist.all_reduce(x)
        dist.all_reduce(x, group=later)
        dist.all_gather_into_tensor(torch.empty(36), x)
        dist.reduce_scatter_tensor(torch.empty(4), x)
        dist.all_to_all_single(torch.empty(12), x)
        splits = [2, 3, 7] if dist.get_rank() == 0 else [4, 4, 4]
        received = [[2, 4, 4], [3, 4, 4], [7, 4, 4]][dist.get_rank()]
        functional.wait_tensor(functional.all_to_all_single(x, received, splits, name))
        if dist.get_rank() < 2:
            peer = 1 - dist.get_rank()
            ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, x.clone(), peer)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        parts = [torch.empty(12) for _ in range(3)]
        dist.all_gather(parts, x)
        dist.broadcast(x, 0)
        dist.gather(x, parts if dist.get_rank() == 0 else None, 0)
        with pytest.raises(NotImplementedError, match="scatter"):
            dist.scatter(x, parts if dist.get_rank() == 0 else None, 0)
    return counter.volumes()


def test_known_exchanges_among_three_ranks() -> None:
    first, second, third = run_on_ranks(send_known_bytes, 3)
    assert first == {
        Flow("fsdp,tp", "all_reduce"): (1, 64.0),
        Flow("world", "all_gather"): (2, 96.0 + 96.0),
        Flow("world", "all_reduce"): (1, 64.0),
        Flow("world", "all_to_all"): (2, 32.0 + 40.0),
        Flow("world", "broadcast"): (1, 96.0),
        Flow("world", "gather"): (1, 0.0),
        Flow("world", "reduce_scatter"): (1, 32.0),
        Flow("world", "send"): (1, 48.0),
    }
    assert second[Flow("world", "all_to_all")].bytes == 64.0
    assert second[Flow("world", "broadcast")].bytes == 0.0
    assert second[Flow("world", "gather")].bytes == 48.0
    assert Flow("world", "send") not in third
