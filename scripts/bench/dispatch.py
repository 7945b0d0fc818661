"""Dispatchers side by side: bytes sent over the fewest that would do, and time.

    python -m scripts.bench.dispatch                            # 2, 4 and 8 gloo ranks here
    python -m scripts.bench.dispatch --ranks 4 --tokens 4096 --dtype float32 --json out.json

One MoE layer's rows go to their experts and come back, forward and backward, through experts that
do nothing, so that all time is dispatch's. Routing is skewed: an expert's rows are up to several
times the mean. "Fewest" is a row for each distinct (token, destination rank) pair, each way, in
both directions; "rows" is what was sent as whole rows over it, "bytes" all that left the ranks,
numbers and routing weights included. With nodes (two ranks each), "between" compares what crosses
nodes with one row for each distinct (token, other node) pair. Times are medians of the slowest
rank, over rounds in which the dispatchers take turns.
"""

import argparse
import statistics
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scripts.bench.measure import options, print_facts, print_table, take_turns, write_json
from titan_moe.distributed.expert_parallel import DispatchOptions, make_dispatcher, nodes_of
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.base import Dispatcher
from titan_moe.ops.permute_indices import count_experts
from titan_moe.simulate.comm_counter import CommCounter
from titan_moe.testing.ranks import run_on_ranks

DISPATCHERS = {
    "standard": DispatchOptions(),
    "deduplicated": DispatchOptions("deduplicated"),
    "by node": DispatchOptions("deduplicated", ranks_per_node=2),
    "bounded 1.25": DispatchOptions("capacity", capacity_factor=1.25),
    "bounded 2": DispatchOptions("capacity", capacity_factor=2.0),
}


class Sizes(NamedTuple):
    tokens: int
    dim: int
    experts: int
    top_k: int
    dtype: str
    repeats: int
    seed: int


class Seen(NamedTuple):
    """Of one dispatcher on one rank."""

    bytes_sent: float
    """All that left the rank in a forward and a backward."""
    bytes_between: float
    """Of it, what left for another node of two ranks, where there are nodes."""
    fewest: int
    """Bytes of a row for each pair of token and other rank, two ways in two directions."""
    fewest_between: int
    dropped: float
    """Share of the choices."""
    seconds: list[float]


def main() -> None:
    arguments = _arguments()
    sizes = Sizes(**{name: getattr(arguments, name) for name in Sizes._fields})
    print_facts(sizes._asdict())
    rows = []
    for ranks in arguments.ranks:
        per_rank = run_on_ranks(measure, ranks, sizes, timeout_s=600)
        for name in per_rank[0]:
            row = summary([found[name] for found in per_rank])
            rows.append({"ranks": ranks, "dispatcher": name, **row})
    cells = [
        [
            row["ranks"],
            row["dispatcher"],
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['bytes_over_fewest']:.3f}",
            "" if row["between_over_fewest"] is None else f"{row['between_over_fewest']:.3f}",
            f"{row['ms']:.1f}",
            f"{row['dropped']:.1%}" if row["dropped"] else "",
        ]
        for row in rows
    ]
    print_table(["ranks", "dispatcher", "MB sent", "bytes", "between", "ms", "dropped"], cells)
    write_json(arguments.json, {"sizes": sizes._asdict(), "rows": rows})


def _arguments() -> argparse.Namespace:
    parser = options(__doc__, repeats=7, seeded=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    return parser.parse_args()


def summary(of_ranks: list[Seen]) -> dict[str, Any]:
    """One dispatcher's figures over all ranks."""
    total, fewest = sum(s.bytes_sent for s in of_ranks), sum(s.fewest for s in of_ranks)
    between = sum(s.fewest_between for s in of_ranks)
    slowest = [max(each) for each in zip(*(s.seconds for s in of_ranks), strict=True)]
    return {
        "bytes": total,
        "bytes_over_fewest": total / fewest,
        "between_over_fewest": (
            sum(s.bytes_between for s in of_ranks) / between if between else None
        ),
        "ms": statistics.median(slowest) * 1e3,
        "dropped": statistics.mean(s.dropped for s in of_ranks),
    }


def measure(sizes: Sizes) -> dict[str, Seen]:
    """Every dispatcher on this rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    meshes = ParallelDims(ranks, ep=ranks).build_mesh("cpu")
    config = MoEConfig(num_experts=sizes.experts, top_k=sizes.top_k, hidden_dim=8)
    drawn = torch.Generator().manual_seed(sizes.seed + rank)
    dtype = getattr(torch, sizes.dtype)
    x_TD = torch.randn(sizes.tokens, sizes.dim, generator=drawn).to(dtype).requires_grad_()
    weights_TK = torch.rand(sizes.tokens, sizes.top_k, generator=drawn).to(dtype).requires_grad_()
    liked_E = 0.7 * torch.randn(sizes.experts, generator=torch.Generator().manual_seed(sizes.seed))
    scores_TE = torch.randn(sizes.tokens, sizes.experts, generator=drawn) + liked_E
    experts_TK = scores_TE.topk(sizes.top_k).indices
    counts_E = count_experts(experts_TK, sizes.experts)
    nodes = nodes_of(meshes, 2)
    row = 4 * sizes.dim * x_TD.element_size()
    fewest, fewest_between = (
        row * pairs for pairs in _pairs(experts_TK // (sizes.experts // ranks), ranks, rank)
    )
    inputs, found = (x_TD, weights_TK, experts_TK, counts_E), {}
    dispatchers = {
        name: make_dispatcher(config, meshes, each)
        for name, each in DISPATCHERS.items()
        if each.ranks_per_node is None or nodes is not None
    }
    runs = {name: partial(_there_and_back, each, *inputs) for name, each in dispatchers.items()}
    seconds = take_turns(runs, sizes.repeats, before=dist.barrier)
    for name, run in runs.items():
        counter = CommCounter()
        # Its groups: those of which both ends are on one node, or all of which may leave it.
        within = nodes.within.group_name if nodes is not None else ""
        counter.groups = {"any": "any", within: "within"}
        with counter:
            dropped = run()
        volumes = counter.volumes()
        sent = sum(v.bytes for v in volumes.values())
        inside = sum(v.bytes for flow, v in volumes.items() if flow.axis == "within")
        by_node = name == "by node"
        found[name] = Seen(
            sent, sent - inside, fewest, fewest_between if by_node else 0, dropped, seconds[name]
        )
    return found


def _pairs(destination_TK: Tensor, ranks: int, rank: int) -> tuple[int, int]:
    """Distinct pairs of token and other rank; of token and other node of two ranks."""
    reached_TP = torch.zeros(len(destination_TK), ranks, dtype=torch.bool)
    reached_TP.scatter_(1, destination_TK, True)
    nodes_TA = reached_TP.unflatten(1, (-1, 2)).any(2)
    others = int(reached_TP.sum() - reached_TP[:, rank].sum())
    return others, int(nodes_TA.sum() - nodes_TA[:, rank // 2].sum())


def _there_and_back(
    dispatcher: Dispatcher, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, counts_E: Tensor
) -> float:
    plan = dispatcher.plan(experts_TK, counts_E)
    rows = dispatcher.receive(dispatcher.send(x_TD, weights_TK, plan), plan)
    y_TD = dispatcher.combine(rows.x_RD * rows.weights_R[:, None], plan)
    torch.autograd.grad(y_TD, (x_TD, weights_TK), torch.ones_like(y_TD))
    dropped = dispatcher.dropped(plan)
    return 0.0 if dropped is None else dropped.item() / experts_TK.numel()


if __name__ == "__main__":
    main()
