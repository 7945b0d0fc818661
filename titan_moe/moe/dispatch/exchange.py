"""The exchange of rows between the ranks of (ep, etp), which all dispatchers between ranks share.

    tokens -> rows to send -> all-to-all over ep -> all-gather over etp -> rows in expert order

and back, where each step is the transpose: gathers become sums, the all-gather a reduce-scatter.
Each rank of an ep group holds some of the experts, each rank of an etp group a slice of the same
experts. A dispatcher's `start_counts` and `sizes` say which rows it sends to whom, and `traffic`
how many; everything else is here.

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
from typing import NamedTuple

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
    last_of_a_layer,
    reduce_scatter_rows,
    start_rows,
    wait_for_rows,
)
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.base import Dispatcher, ExpertRows
from titan_moe.ops.move_rows import RowMap, combine_rows, copy_rows, gather_rows, gathered_rows
from titan_moe.ops.permute_indices import permute_indices, row_map


@dataclass(frozen=True)
class Draft:
    """A dispatch before the counts of other ranks are here."""

    rows: RowMap
    """Maps tokens to the rows that leave; `source_R` may be longer than the number of rows."""
    weights: RowMap
    """(token, k) slots to the routing weights that leave."""
    sent_PE: Tensor
    """Choices of this rank's tokens, by rank and by expert there."""
    counts: InFlight
    """Rows that other ranks send here, under way."""


@dataclass(frozen=True)
class Plan:
    """The exchanges of a dispatch."""

    num_rows: int
    """Number of rows that leave, the first of the draft's."""
    rows: RowExchange
    weights: RowExchange
    """The exchange of routing weights. It has more entries than `rows` where a row travels once for
    several experts."""
    rows_gathered: list[int]
    """Rows of each rank of the etp group."""
    weights_gathered: list[int]
    counts_PE: Tensor
    """Choices of each local expert by the rank that they come from, those of one etp rank after the
    other; experts after the last are rows that nothing reads."""
    dropped: Tensor | None = None
    """Number of the T*K rows that exceed the capacity, [] int64; None: none can."""


class Hop(NamedTuple):
    """Received rows copied on to other ranks."""

    copies: RowMap
    exchange: AllToAll


class Order(NamedTuple):
    """Maps from the rows of all ranks of the etp group to padded expert-major order."""

    rows: RowMap
    weights: RowMap
    offsets_E: Tensor
    hop: Hop | None = None
    """Rows take it before they are ordered."""


class Gathered(NamedTuple):
    """Copies of the tokens and weights that leave. Of the tokens' autograd does not know yet: how
    many leave is not known when they are made."""

    x_TD: Tensor
    weights_N1: Tensor
    x_ND: Tensor
    rows: RowMap


class Sent(NamedTuple):
    """Rows and weights between `send` and `receive`."""

    x_ND: RowsInFlight
    weights_N1: RowsInFlight


@dataclass(eq=False)
class ExchangeDispatcher(Dispatcher):
    """Rows and their routing weights: all-to-all over ep, then all-gather over etp; and back.

    Args:
        ep_group: the ranks that hold the other experts.
        etp_group: the ranks that hold the other slices of the same experts.
    """

    ep_group: ProcessGroup
    etp_group: ProcessGroup
    config: MoEConfig

    def __post_init__(self) -> None:
        self.num_local = self.config.num_experts // self.ep_group.size()
        self.top_k, self.row_alignment = self.config.top_k, self.config.row_alignment

    def gather(self, x_TD: Tensor, weights_TK: Tensor, draft: Draft) -> Gathered:
        weights_N1 = gather_rows(weights_TK.reshape(-1, 1), draft.weights)
        x_ND = copy_rows(x_TD.detach(), draft.rows.source_R)
        return Gathered(x_TD, weights_N1, x_ND, draft.rows)

    def send(self, gathered: Gathered, plan: Plan) -> Sent:
        x_ND = gathered_rows(gathered.x_TD, gathered.x_ND[: plan.num_rows], gathered.rows)
        # Weights first: rows are waited for before them, in the backward too, so that one turn is
        # passed on for both.
        weights_N1 = start_rows(gathered.weights_N1, plan.weights)
        return Sent(start_rows(x_ND, plan.rows, self.turns), weights_N1)

    def order(self, plan: Plan) -> Order:
        """Returns the order of rows that are sent once for each expert, and of their weights."""
        permuted = permute_indices(plan.counts_PE, sum(plan.rows_gathered), self.row_alignment)
        rows = row_map(permuted)
        return Order(rows, rows, permuted.offsets_E[: self.num_local])

    def receive(self, sent: Sent, plan: Plan, order: Order) -> ExpertRows:
        x_ND, weights_N1 = wait_for_rows(sent.x_ND), wait_for_rows(sent.weights_N1)
        if order.hop is not None:
            x_ND = exchange_rows(gather_rows(x_ND, order.hop.copies), order.hop.exchange)
        if self.etp_group.size() > 1:
            x_ND = all_gather_rows(x_ND, plan.rows_gathered, self.etp_group)
            weights_N1 = all_gather_rows(weights_N1, plan.weights_gathered, self.etp_group)
        return ExpertRows(
            x_RD=gather_rows(x_ND, order.rows),
            weights_R=gather_rows(weights_N1, order.weights).flatten(),
            offsets_E=order.offsets_E,
        )

    def send_home(self, y_RD: Tensor, plan: Plan, order: Order) -> RowsInFlight:
        y_ND = combine_rows(y_RD, order.rows)
        with last_of_a_layer():
            if self.etp_group.size() > 1:
                y_ND = reduce_scatter_rows(y_ND, plan.rows_gathered, self.etp_group)
            if order.hop is not None:
                y_ND = exchange_rows(y_ND, order.hop.exchange.reverse())
                y_ND = combine_rows(y_ND, order.hop.copies)
            return start_rows(y_ND, plan.rows.reverse(), self.turns)

    def add_up(self, home: RowsInFlight, draft: Draft) -> Tensor:
        return combine_rows(wait_for_rows(home), draft.rows)

    def gather_counts(self, counts: Tensor) -> Tensor:
        """The counts of all Q ranks of the etp group: [Q, *counts.shape]."""
        if self.etp_group.size() == 1:
            return counts[None]
        return gather_parts(counts, self.etp_group)
