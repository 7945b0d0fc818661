"""Every dispatcher gives the outputs and gradients of one expression: each token's experts, weighed
and added up. Rows that are no token's hold NaN."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.tiers import tiered
from titan_moe.runtime.ranks import run_on_ranks

TOKENS, TOP_K, EXPERTS, DIM = 13, 3, 8, 6
DEDUPLICATED, CAPACITY, SYMMETRIC = "deduplicated", "capacity", "symmetric"
BALANCED = "balanced"


class Case(NamedTuple):
    ep: int
    etp: int = 1
    name: str = "standard"
    ranks_per_node: int | None = None
    capacity_factor: float | None = 1.0


class Seen(NamedTuple):
    error: float
    rows_sent: int
    fewest: int
    dropped: int | None
    """The choices that the dispatcher says it dropped; `missing` counts them in its sums."""
    missing: int


_FOUR = [(4, 1), (2, 2), (1, 4)]
"""The degrees (ep, etp) of four ranks."""
CASES = {
    2: [
        Case(2),
        Case(2, name=DEDUPLICATED),
        Case(2, name=BALANCED),
        Case(1, 2, DEDUPLICATED),
        Case(2, name=CAPACITY, capacity_factor=9),
        Case(2, name=SYMMETRIC, capacity_factor=None),
        Case(2, name=SYMMETRIC, capacity_factor=1.9),
        Case(1, 2),
    ],
    4: [
        *(Case(*degrees, n) for n in ("standard", DEDUPLICATED) for degrees in _FOUR),
        *(Case(*degrees, BALANCED) for degrees in _FOUR[:2]),
        Case(2, name=DEDUPLICATED),
        Case(4, name=DEDUPLICATED, ranks_per_node=2),
        *(Case(*degrees, CAPACITY, capacity_factor=9) for degrees in _FOUR[:2]),
        Case(1, 4, name=CAPACITY, capacity_factor=1),
        Case(4, name=CAPACITY, capacity_factor=2.5),
        Case(4, name=SYMMETRIC, capacity_factor=None),
        Case(2, 2, SYMMETRIC, capacity_factor=None),
        Case(2, 2, SYMMETRIC, capacity_factor=1.9),
    ],
    8: [
        *(Case(8, name=DEDUPLICATED, ranks_per_node=ranks) for ranks in (None, 2, 4)),
        Case(4, 2, DEDUPLICATED, ranks_per_node=4),
        *(Case(*degrees, BALANCED) for degrees in [(8, 1), (4, 2)]),
    ],
}
SMALL = [
    Case(4, name=CAPACITY, capacity_factor=1),
    Case(4, name=CAPACITY, capacity_factor=0.3),
    Case(2, 2, name=CAPACITY, capacity_factor=0.7),
    Case(1, 4, name=CAPACITY, capacity_factor=0.5),
]


def travel(cases: list[Case]) -> list[Seen]:
    return [_travel(case) for case in cases]


def _travel(case: Case) -> Seen:
    from titan_moe.distributed.parallel_dims import ParallelDims
    from titan_moe.ops.permute_indices import sort_by_expert

    rank = dist.get_rank()
    dims = ParallelDims(dist.get_world_size(), ep=case.ep, etp=case.etp)
    meshes = dims.build_mesh("cpu")
    dispatcher = _dispatcher(case, meshes)
    drawn = torch.Generator().manual_seed(rank)
    options = {"dtype": torch.float64, "generator": drawn}
    x_TD = torch.randn(TOKENS, DIM, requires_grad=True, **options)
    weights_TK = torch.rand(TOKENS, TOP_K, requires_grad=True, **options)
    grad_TD = torch.randn(TOKENS, DIM, **options)
    liked_E = torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0, 0.0, -50.0, 0.0])  # One expert idles.
    experts_TK = (torch.randn(TOKENS, EXPERTS, generator=drawn) + liked_E).topk(TOP_K).indices
    shared = torch.Generator().manual_seed(99)
    w_EDD = torch.randn(EXPERTS, DIM, DIM, dtype=torch.float64, generator=shared).requires_grad_()

    route = dispatcher.route(experts_TK, sort_by_expert(experts_TK, EXPERTS))
    sent = dispatcher.send(x_TD, weights_TK, route)
    dispatcher.order(route)
    first = dims.coordinate(rank, "ep") * (EXPERTS // case.ep)
    share = (dims.coordinate(rank, "etp") + 1) / sum(range(1, case.etp + 1))
    own = slice(first, first + EXPERTS // case.ep)
    w_LDD = (share * w_EDD[own]).detach().requires_grad_()
    if case.name == BALANCED and route.borrowed is not None:
        route.borrowed.start({"w": w_LDD})
    rows = dispatcher.receive(sent, route)
    joined = w_LDD if rows.borrowed is None else rows.borrowed.join("w", w_LDD)
    y_TD = dispatcher.add_up(dispatcher.send_home(_experts(rows, joined), route), route)
    kept_TK = torch.ones_like(weights_TK).bool()
    if case.name == CAPACITY:
        kept_TK = route.rows.rows_TK >= 0
    expected_TD = sum(
        (weights_TK * kept_TK)[:, k, None]
        * torch.einsum("td,tde->te", x_TD, w_EDD[experts_TK[:, k]])
        for k in range(TOP_K)
    )
    inputs = x_TD, weights_TK
    ours = (y_TD, *torch.autograd.grad(y_TD, (*inputs, w_LDD), grad_TD))
    *theirs, grad_EDD = torch.autograd.grad(expected_TD, (*inputs, w_EDD), grad_TD)
    dist.all_reduce(grad_EDD, group=meshes.group(("ep", "etp")))
    theirs = (expected_TD, *theirs, grad_EDD[own])
    errors = [(a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)]
    traffic = dispatcher.traffic(experts_TK, route).tolist()
    if case.name == BALANCED:
        assert traffic == _traffic_of_loans(route, case, dims.coordinate(rank, "ep"))
    return Seen(
        max(errors),
        *traffic,
        None if route.dropped is None else route.dropped.item(),
        int((~kept_TK).sum()),
    )


def _traffic_of_loans(route, case: Case, own: int) -> list[int]:
    """Counts the rows in a route's exchange, and pairs of token and rank, one by one."""
    ranks = [rank for rank, number in enumerate(route.exchange.sent) for _ in range(number)]
    pairs = {(t, ranks[row]) for t, rows in enumerate(route.rows.rows_TK.tolist()) for row in rows}
    at = [rank for _, rank in pairs]
    return [case.etp * len(x) - x.count(own) for x in (ranks, at)]


def _dispatcher(case: Case, meshes):
    from titan_moe.comm.symmetric_memory import open_channels
    from titan_moe.distributed.expert_parallel import DISPATCHERS, DispatchOptions
    from titan_moe.moe.config import MoEConfig, rows_of_buffers

    config = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, hidden_dim=8, row_alignment=4)
    options = DispatchOptions(case.name, case.capacity_factor, case.ranks_per_node)
    dispatcher = DISPATCHERS[case.name](config, meshes, options)
    if case.name == SYMMETRIC and case.ep > 1:
        rows = rows_of_buffers(TOKENS, TOP_K, EXPERTS, case.ep, case.capacity_factor)
        device = torch.device("cpu")
        dispatcher.channels = open_channels(
            meshes.group("ep"), max(rows, TOKENS * TOP_K), DIM, torch.float64, device
        )
    return dispatcher


def _experts(rows, w_EDD: Tensor) -> Tensor:
    """Weighted products of each expert's rows; NaN in padding and behind them."""
    ends = rows.offsets_E.tolist()
    parts = [
        rows.x_RD[start:end] @ w_DD * rows.weights_R[start:end, None]
        for start, end, w_DD in zip([0, *ends], ends, w_EDD, strict=False)
    ]
    tail = torch.full_like(rows.x_RD[ends[-1] :], torch.nan)
    y_RD = torch.cat([*parts, tail])
    return y_RD.masked_fill((rows.weights_R == 0)[:, None], torch.nan)


@pytest.mark.parametrize("world_size", tiered([2], slow=[4], full=[8]))
def test_each_dispatcher_returns_weighted_sums_and_their_gradients(world_size: int):
    for seen in run_on_ranks(travel, world_size, CASES[world_size]):
        for case, one in zip(CASES[world_size], seen, strict=True):
            assert one.error <= 1e-13, (case, one)
            assert not one.missing or (case.capacity_factor == 2.5 and one.dropped == one.missing)
            if case.name == DEDUPLICATED:
                assert one.rows_sent == one.fewest, (case, one)
            elif case.name in ("standard", SYMMETRIC):
                assert one.rows_sent >= one.fewest, (case, one)
            if case.name == SYMMETRIC:
                assert one.dropped == (0 if case.ep > 1 else None), (case, one)
            else:
                assert (one.dropped is None) == (case.capacity_factor != 2.5), (case, one)


def test_choices_beyond_the_capacity_are_left_out_and_counted():
    for seen in run_on_ranks(travel, 4, SMALL):
        for case, one in zip(SMALL, seen, strict=True):
            assert one.error <= 1e-13, (case, one)
            assert one.dropped == one.missing > 0, (case, one)


def test_first_choices_come_before_second_ones():
    from titan_moe.moe.config import MoEConfig
    from titan_moe.moe.dispatch.capacity import CapacityDispatcher

    class Group:
        rank, size = staticmethod(lambda: 0), staticmethod(lambda: 2)

    config = MoEConfig(num_experts=8, top_k=2, hidden_dim=8)
    dispatcher = CapacityDispatcher(Group(), Group(), config, capacity_factor=1.0)
    rank_TK = torch.tensor([[1, 0], [0, 0], [0, 1], [0, 0]])
    kept_TK = dispatcher._first_come(rank_TK, torch.tensor([6, 2]), capacity=4)
    assert kept_TK.tolist() == [[True, True], [True, False], [True, True], [True, False]]
