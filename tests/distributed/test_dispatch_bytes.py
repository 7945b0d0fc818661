"""What MoE layers send is what the routing requires, byte by byte and rank by rank.

Every collective on a group that carries tokens is counted while a layer runs forward or backward.
The arithmetic beside it knows only how one process routes the same rows: counts, rows and routing
weights on the way to the experts, rows on the way back, the same rows again in the backward, and
nothing more.
"""

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.dispatch_arithmetic import (
    BYTES,
    CONFIG,
    LAYERS,
    TOP_K,
    Border,
    buffers,
    degrees,
    expected,
)
from tests.support.tiers import tiered
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.models.config import ModelConfig
from titan_moe.models.registry import model_config
from titan_moe.runtime.ranks import RankError, run_on_ranks
from titan_moe.simulate.comm_counter import CommCounter, arguments_of
from titan_moe.verify.gradients.fixture import make_rows
from titan_moe.verify.gradients.worker import own_batches
from titan_moe.verify.layouts.layouts import (
    SEQ_LEN,
    Layout,
    apply_layout,
    num_rows,
    parse,
    stages,
)

ROWS = 16
LAYOUTS = tiered(
    [
        "dp_shard=2,ep=2",
        "tp=2,etp=2",
        "dp_shard=2,ep=2,dispatch=deduplicated",
        "dp_shard=2,tp=2,ep=4,dispatch=nodes",
        "dp_shard=2,tp=2,ep=2,etp=2,dispatch=bounded",
    ],
    slow=[
        "dp_shard=2,tp=2,ep=2",
        "dp_shard=2,cp=2,tp=2,ep=2,etp=4",
        "dp_shard=2,tp=2,ep=2,etp=2,dispatch=deduplicated",
        "dp_shard=2,tp=2,ep=4,dispatch=bounded",
    ],
    full=[
        "dp_shard=2,cp=2,tp=2,ep=8",
        "dp_shard=4,etp=4",
        "dp_replicate=2,dp_shard=2,tp=2,ep=2,etp=2",
        "pp=2,dp_shard=2,tp=2,ep=4",
        "dp_shard=2,cp=2,tp=2,ep=8,dispatch=deduplicated",
        "dp_shard=2,cp=2,tp=2,ep=4,etp=2,dispatch=nodes",
        "tp=2,etp=2,dispatch=deduplicated",
    ],
)


class Seen(NamedTuple):
    """What one rank did."""

    sent: Counter
    """(phase, ranks of the group) -> bytes that left this rank."""
    passed: int
    """Bytes given to all-to-alls, those for this rank itself included."""
    rows_sent: Tensor
    rows_over_bound: float | None
    experts: dict[str, list[Tensor]]
    """Each layer's decisions in the order they were made: experts_TK."""


class LayerCounter(CommCounter):
    """Counts what leaves this rank between the borders of MoE layers."""

    def __init__(self, members: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.groups = {name: name for name in members}
        self.members = members
        self.phase: str | None = None
        self.sent: Counter = Counter()
        self.passed = 0

    def count(self, func: Any, args: tuple) -> None:
        self.clear()
        super().count(func, args)
        for flow, volume in self.volumes().items():
            if self.phase and flow.axis in self.members:  # Else FSDP's or the world's.
                self.sent[self.phase, self.members[flow.axis]] += volume.bytes
                if flow.op == "all_to_all":
                    self.passed += arguments_of(func, args)["input"].nbytes

    def around(self, forward: Any) -> Any:
        """A layer's forward with its borders marked, for both directions."""

        def marked(x: Tensor) -> Tensor:
            y = forward(Border.apply(x, self, "forward", None))
            return Border.apply(y, self, None, "backward")

        return marked


@dataclass
class Task:
    job: JobConfig
    config: ModelConfig
    layout: Layout
    planted: str | None = None


def train_on_rank(task: Task) -> Seen:
    from titan_moe.distributed.expert_parallel import nodes_of
    from titan_moe.distributed.parallelize import build_sharded_model
    from titan_moe.optim.optimizers import build_optimizer
    from titan_moe.train_step import TrainStep, local_batch

    job, layout, cpu = task.job, task.layout, torch.device("cpu")
    sharded = build_sharded_model(job, task.config, device=cpu, world_size=layout.world_size)
    meshes, rank = sharded.meshes, dist.get_rank()
    axes = [axis for axis in ("cp", "tp", "sequence", "ep", "etp") if meshes.dims.size(axis) > 1]
    members = {meshes.group(a).group_name: meshes.dims.group_of(rank, a) for a in axes}
    for group in nodes_of(meshes, 2 * meshes.dims.etp) or ():
        members[group.group_name] = tuple(dist.get_process_group_ranks(group))
    counter = LayerCounter(members)
    experts: dict[str, list[Tensor]] = {}
    for name, moe in sharded.moe_layers().items():
        moe.forward = counter.around(moe.forward)
        plant(moe, task.planted, meshes)
        experts[name] = []
        moe.routing_fn = _kept(moe.routing_fn, experts[name])
    rows = make_rows(num_rows(layout), SEQ_LEN, task.config.vocab_size, seed=1)
    place = meshes.dims.coordinate(rank, "batch")
    batches = own_batches(rows, job.training.local_batch_size, place, layout.data_ranks)
    with counter if task.job.activation_checkpoint.mode == "none" else nullcontext():
        for batch in batches:
            sharded.execution.train(local_batch(batch, sharded, cpu))
    sent, passed = counter.sent.copy(), counter.passed
    decided = {name: list(chosen) for name, chosen in experts.items()}
    sharded.train(False)
    sharded.execution.evaluate(local_batch(batches[0], sharded, cpu))
    sharded.train(True)
    layers = sharded.moe_layers().values()
    rows_sent = torch.stack([moe.rows_sent for moe in layers]).sum(0).clone()
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters())
    result = TrainStep(sharded, optimizer, job.training, device=cpu)(batches)
    assert not any(moe.rows_sent.any() for moe in layers)
    assert result.metrics is not None
    over_bound = result.metrics.get("dispatch/rows_over_bound")
    return Seen(sent, passed, rows_sent, over_bound, decided)


def _kept(choose: Any, taken: list[Tensor]) -> Any:
    def choose_and_keep(scores_TE: Tensor) -> Tensor:
        taken.append(choose(scores_TE))
        return taken[-1]

    return choose_and_keep


def plant(moe: Any, bug: str | None, meshes: Any) -> None:
    if bug == "every tp rank dispatches all tokens":
        from titan_moe.distributed.collectives import gather_tokens

        forward, group = moe.forward, meshes.group("tp")

        def of_all_tokens(x: Tensor) -> Tensor:
            y = forward(gather_tokens(x, group))
            return y.chunk(group.size(), -2)[dist.get_rank(group)]

        moe.forward = of_all_tokens
    elif bug == "rows are sent twice":
        send, receive = moe.dispatcher.send, moe.dispatcher.receive

        def send_twice(x_TD: Tensor, weights_TK: Tensor, plan: Any) -> Any:
            return send(x_TD, weights_TK, plan), send(x_TD, weights_TK, plan)

        def receive_twice(sent: Any, plan: Any) -> Any:
            first, again = (receive(once, plan) for once in sent)
            return first._replace(x_RD=(first.x_RD + again.x_RD) / 2)

        moe.dispatcher.send, moe.dispatcher.receive = send_twice, receive_twice
    elif bug == "counted in recomputation":
        from titan_moe.moe.layer import RoutingMemo

        RoutingMemo._replay = RoutingMemo._record


def make_task(layout: str, planted: str | None = None) -> Task:
    parsed = parse(layout)
    # Whole sequences' counts are the loss's to sum, not dispatch's.
    tables = {"moe": {"sequence_aux_loss_weight": 0.0}}
    job = apply_layout(load_job(["--job.config_file", CONFIG]), parsed, tables)
    config = model_config("qwen3", "gate")
    assert config.moe is not None
    moe = replace(config.moe, top_k=TOP_K)
    config = replace(config, num_layers=LAYERS, moe=moe)
    return Task(job, config, parsed, planted)


def run(layout: str, planted: str | None = None) -> list[Seen]:
    task = make_task(layout, planted)
    return run_on_ranks(train_on_rank, task.layout.world_size, task)


@cache
def routing() -> dict[str, Tensor]:
    """How one process routes: each layer's experts of every row and position, [B, S, K]."""
    (seen,) = run("dp_shard=1")
    assert not seen.sent and seen.rows_over_bound is None
    return {
        name: torch.cat([chosen.view(-1, SEQ_LEN, TOP_K) for chosen in decisions])
        for name, decisions in seen.experts.items()
    }


def destinations(layout: Layout, rank: int) -> Tensor:
    """Where the tokens of a rank's layers must go: the ep coordinates of each token's experts."""
    dims = degrees(layout)
    per_rank = ROWS // dims.size("batch")
    first = dims.coordinate(rank, "batch") * per_rank
    chunks = torch.arange(SEQ_LEN).chunk(2 * dims.cp)
    cp = dims.coordinate(rank, "cp")
    # Head-tail balance; without cp the two halves are the whole row.
    positions = torch.cat([chunks[cp], chunks[2 * dims.cp - 1 - cp]])
    positions = positions.chunk(dims.tp)[dims.coordinate(rank, "tp")]
    own = stages(layout)[dims.coordinate(rank, "pp")] if dims.pp > 1 else routing()
    layers = [routing()[name] for name in own if name.startswith("layers.")]
    chosen = [layer[first : first + per_rank, positions].flatten(0, 1) for layer in layers]
    return torch.cat(chosen) // (8 // dims.ep)


def decisions_of(one: Seen) -> list[int]:
    """The tokens of each decision that a rank's layers made."""
    return [len(taken) for chosen in one.experts.values() for taken in chosen]


def problems(layout: str, seen: list[Seen]) -> list[str]:
    parsed, dim = parse(layout), make_task(layout).config.dim
    lines = []
    for rank, one in enumerate(seen):
        wanted = expected(parsed, rank, dim, decisions_of(one), partial(destinations, parsed))
        if one.sent != wanted:
            lines.append(f"rank {rank}: {dict(one.sent)}, by the routing {dict(wanted)}")
    return lines


def traffic(layout: str, seen: list[Seen]) -> Tensor:
    """Rows sent and distinct (token, destination rank) pairs, token by token; with nodes,
    rows between nodes and distinct (token, node) pairs."""
    parsed = parse(layout)
    dims = degrees(parsed)
    rows = pairs = 0
    by_nodes = parsed.dispatch == "nodes" and dims.ep > 2
    for rank in range(dims.world_size):
        here = dims.coordinate(rank, "ep"), dims.coordinate(rank, "etp")
        if by_nodes:
            here = here[0] // 2, 0
        for places in destinations(parsed, rank).tolist():
            copies = [(place, slice_) for place in places for slice_ in range(dims.etp)]
            if by_nodes:
                copies = [(place // 2, 0) for place in places]
            rows += sum(copy != here for copy in copies)
            pairs += len(set(copies) - {here})
    if parsed.dispatch in ("deduplicated", "nodes"):
        rows = pairs
    if parsed.dispatch == "bounded":
        each = dims.ep * dims.etp - 1
        rows = each * sum(sum(buffers(parsed, decisions_of(one))) for one in seen)
    return torch.tensor([rows, pairs])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_travels_is_what_the_routing_requires(layout: str):
    seen = run(layout)
    assert problems(layout, seen) == []
    rows, fewest = traffic(layout, seen).tolist()
    assert sum(one.rows_sent for one in seen).tolist() == [rows, fewest]
    for one in seen:
        assert one.rows_over_bound == pytest.approx(rows / fewest, rel=1e-12)
    if parse(layout).dispatch in ("deduplicated", "nodes"):
        assert rows == fewest
    else:
        assert rows > fewest or layout.endswith("ep=8")  # One expert a rank: nothing to save.


@pytest.mark.slow
def test_no_more_travels_with_tp():
    totals = {}
    for layout in ("dp_shard=4,ep=4", "dp_shard=2,tp=2,ep=4", "tp=4,ep=4"):
        seen = run(layout)
        assert problems(layout, seen) == []
        decisions = sum(len(chosen) for one in seen for chosen in one.experts.values())
        totals[layout] = sum(one.passed for one in seen) - decisions * 8 * BYTES
    num_rows = ROWS * SEQ_LEN * TOP_K * LAYERS
    dim = make_task("dp_shard=1").config.dim
    assert set(totals.values()) == {2 * num_rows * (2 * dim + 1) * BYTES}


@pytest.mark.slow
def test_recomputation_and_validation_are_not_counted():
    layout = "dp_shard=2,tp=2,ep=2"
    seen = run(f"{layout},recompute=full")
    assert sum(one.rows_sent for one in seen).tolist() == traffic(layout, seen).tolist()
    with pytest.raises(RankError, match="a recomputed forward changed"):
        run(f"{layout},recompute=full", "counted in recomputation")


def test_rows_and_pairs_of_a_few_tokens():
    from titan_moe.moe.config import MoEConfig
    from titan_moe.moe.dispatch.all_to_all import AllToAllDispatcher
    from titan_moe.ops.permute_indices import count_experts

    class Group:
        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.size = (lambda: rank), (lambda: size)

    def count(experts_TK: list[list[int]], rank: int, etp: int = 1) -> list[int]:
        groups = Group(rank, 2), Group(0, etp)
        config = MoEConfig(num_experts=8, top_k=len(experts_TK[0]), hidden_dim=8)
        dispatcher = AllToAllDispatcher(*groups, config)
        chosen_TK = torch.tensor(experts_TK)
        return dispatcher.traffic(chosen_TK, count_experts(chosen_TK, 8)).tolist()

    # All of a token's experts on one other rank: K rows where one would do.
    assert count([[0, 1, 2, 3], [3, 2, 1, 0]], rank=1) == [8, 2]
    assert count([[0, 1, 2, 3], [3, 2, 1, 0]], rank=0) == [0, 0]
    assert count([[0, 4], [5, 1]], rank=0) == [2, 2]
    # The other slices of own experts are elsewhere: 2 ranks x 2 tokens x 2 rows, less the own.
    assert count([[0, 4], [5, 1]], rank=0, etp=2) == [6, 6]
    assert count([[4, 5], [6, 7]], rank=0, etp=2) == [8, 4]
    assert count([[0, 1], [2, 3]], rank=0, etp=2) == [4, 2]


@pytest.mark.parametrize(
    "bug", tiered(["rows are sent twice"], slow=["every tp rank dispatches all tokens"])
)
def test_a_planted_bug_is_seen(bug: str):
    layout = "dp_shard=2,tp=2,ep=2"
    assert len(problems(layout, run(layout, bug))) == 4
