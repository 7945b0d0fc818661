"""The standard dispatcher: each of the T*K rows is sent to its expert and back.

    tokens -> rows to send -> all-to-all over ep -> all-gather over etp -> rows in expert order

and back, where each step is the transpose: gathers become sums, the all-gather a reduce-scatter.
Each rank of an ep group holds some of the experts, each rank of an etp group a slice of the same
experts. The other dispatchers between ranks differ in `route` and `plan`, which say which rows are
sent to whom.

The order in which a layer issues its work, and autograd the backward of it. The forward reads
downwards, the backward upwards:

    | forward          | backward         |
    |------------------|------------------|
    | start counts     |                  |
    | gather           |                  |
    | wait for counts  |                  |
    | start weights    | wait for weights |
    | start rows       | wait for rows    |
    | shared experts   | shared experts   |
    | order            |                  |
    | wait for rows    | start rows       |
    | wait for weights | start weights    |
    | experts          | experts          |
    | start outputs    | wait for outputs |
    | wait for outputs | start outputs    |
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.comm.collectives import (
    AllToAll,
    InFlight,
    RowExchange,
    RowsInFlight,
    all_gather_rows,
    exchange_rows,
    gather_parts,
    never_kept,
    reduce_scatter_rows,
    start_numbers,
    start_rows,
    to_host,
    wait_for_rows,
)
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.base import Dispatcher, ExpertRows, Route
from titan_moe.ops.move_rows import (
    RowMap,
    combine_rows,
    copy_rows,
    gather_rows,
    gather_rows_twice,
    gathered_rows,
)
from titan_moe.ops.permute_indices import Sorted, permute_indices, reached_ranks, row_map


class ExchangeRoute(Route):
    """A route between ranks. `plan` sets the exchanges, `order` the order of the rows that come."""

    num_rows: int
    """Number of rows that leave, the first of `rows`."""
    exchange: RowExchange
    weights_exchange: RowExchange
    """Has more entries than `exchange` where a row travels once for several experts."""
    gathered: list[int]
    """Rows of each rank of the etp group."""
    weights_gathered: list[int]
    counts_PE: Tensor
    """Choices of each local expert by the rank that they come from, those of one etp rank after the
    other; experts after the last are rows that nothing reads."""

    ordered: RowMap
    """Maps the rows of all ranks of the etp group to padded expert-major order."""
    weights_ordered: RowMap
    hop: tuple[RowMap, AllToAll] | None = None
    """Copies of received rows, and the exchange that takes them on to other ranks."""

    def __init__(self, rows: RowMap, weights: RowMap, sent_PE: Tensor, counts: InFlight) -> None:
        super().__init__(rows, weights)
        self.num_experts = sent_PE.shape[1]
        """Experts whose rows are computed here."""
        self.sent_PE = sent_PE
        """Choices of this rank's tokens, by rank and by expert there."""
        self.counts = counts
        """Rows that other ranks send here, under way."""


@dataclass(eq=False)
class AllToAllDispatcher(Dispatcher):
    """Rows and their routing weights: all-to-all over ep, then all-gather over etp; and back.

    Args:
        ep_group: the ranks that hold the other experts.
        etp_group: the ranks that hold the other slices of the same experts.
    """

    ep_group: ProcessGroup
    etp_group: ProcessGroup
    config: MoEConfig
    waits_for_host = True

    def __post_init__(self) -> None:
        self.num_local = self.config.num_experts // self.ep_group.size()
        self.top_k, self.row_alignment = self.config.top_k, self.config.row_alignment

    def traffic(self, experts_TK: Tensor, route: ExchangeRoute) -> Tensor:
        """Counts rows and (token, rank) pairs on the way to the experts, etp gathering included."""
        sent_P = route.sent_PE.sum(1)
        reached_TP = reached_ranks(experts_TK, self.num_local, len(sent_P))
        return self.to_others(torch.stack([sent_P, reached_TP.sum(0)], 1))

    def to_others(self, rows_P: Tensor) -> Tensor:
        """Returns how many of the rows for each ep rank, [P, ...], are sent to other ranks.

        All etp ranks that hold an expert's slices need its tokens' rows. A row of a remote expert
        is sent once over ep and etp - 1 times over etp; a row of a local expert, the latter only.
        """
        return self.etp_group.size() * rows_P.sum(0) - rows_P[self.ep_group.rank()]

    def route(self, experts_TK: Tensor, rows: Sorted) -> ExchangeRoute:
        sent_PE = rows.counts_E.view(-1, self.num_local)
        counts = start_numbers(sent_PE, AllToAll.of_table(self.ep_group))
        return ExchangeRoute(rows.tokens, rows.slots, sent_PE, counts)

    def plan(self, route: ExchangeRoute) -> None:
        """Sets the exchanges of a route, once the counts are here."""
        received_PE = route.counts.wait()
        gathered_QPE = self.gather_counts(received_PE)
        route.num_rows = len(route.rows.source_R)
        if self.ep_group.size() == 1:  # Every rank keeps all rows of as many tokens.
            sent = received = [route.num_rows]
            route.gathered = [route.num_rows] * len(gathered_QPE)
        else:
            # Host sync, once per chunk: collectives of rows take their sizes as Python ints.
            sent, received, route.gathered = to_host(
                route.sent_PE.sum(1), received_PE.sum(1), gathered_QPE.sum((1, 2))
            )
        route.exchange = route.weights_exchange = AllToAll(sent, received, self.ep_group)
        route.weights_gathered, route.counts_PE = route.gathered, gathered_QPE.flatten(0, 1)

    def send(
        self, x_TD: Tensor, weights_TK: Tensor, route: ExchangeRoute
    ) -> tuple[RowsInFlight, RowsInFlight]:
        """Returns rows and weights under way."""
        weights_N1 = gather_rows(weights_TK.reshape(-1, 1), route.weights)
        # Autograd does not know of these copies yet: how many leave is not known while counts
        # travel.
        x_ND = copy_rows(x_TD.detach(), route.rows.source_R)
        if not route.complete:
            self.plan(route)
        x_ND = gathered_rows(x_TD, x_ND[: route.num_rows], route.rows)
        # Weights first: rows are waited for before them, in the backward too, so that one turn is
        # passed on for both.
        weights = start_rows(weights_N1, route.weights_exchange)
        return start_rows(x_ND, route.exchange, self.turns), weights

    def order(self, route: ExchangeRoute) -> None:
        permuted = permute_indices(route.counts_PE, sum(route.gathered), self.row_alignment)
        route.ordered = route.weights_ordered = row_map(permuted)
        route.offsets_E = permuted.offsets_E[: route.num_experts]

    def receive(self, sent: tuple[RowsInFlight, RowsInFlight], route: ExchangeRoute) -> ExpertRows:
        x_ND, weights_N1 = (wait_for_rows(under_way) for under_way in sent)
        if route.hop is not None:
            copies, exchange = route.hop
            x_ND = exchange_rows(gather_rows(x_ND, copies), exchange)
        if self.etp_group.size() > 1:
            x_ND = all_gather_rows(x_ND, route.gathered, self.etp_group)
            weights_N1 = all_gather_rows(weights_N1, route.weights_gathered, self.etp_group)
        x_RD, again_RD = gather_rows_twice(x_ND, route.ordered)
        weights_R = gather_rows(weights_N1, route.weights_ordered).flatten()
        return ExpertRows(x_RD, weights_R, route.offsets_E, again_RD=again_RD)

    def send_home(self, y_RD: Tensor, route: ExchangeRoute) -> RowsInFlight:
        y_ND = combine_rows(y_RD, route.ordered)
        with never_kept():
            if self.etp_group.size() > 1:
                y_ND = reduce_scatter_rows(y_ND, route.gathered, self.etp_group)
            if route.hop is not None:
                copies, exchange = route.hop
                y_ND = combine_rows(exchange_rows(y_ND, exchange.reverse()), copies)
            return start_rows(y_ND, route.exchange.reverse(), self.turns)

    def add_up(self, home: RowsInFlight, route: ExchangeRoute) -> Tensor:
        return combine_rows(wait_for_rows(home), route.rows)

    def gather_counts(self, counts: Tensor) -> Tensor:
        """Returns the counts of all Q ranks of the etp group: [Q, *counts.shape]."""
        if self.etp_group.size() == 1:
            return counts[None]
        return gather_parts(counts, self.etp_group)
