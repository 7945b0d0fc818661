"""The exchange of rows between the ranks of (ep, etp), which all dispatchers between ranks share.

    tokens -> rows to send -> all-to-all over ep -> all-gather over etp -> rows in expert order

and back, where each step is the transpose: gathers become sums, the all-gather a reduce-scatter.
Each rank of an ep group holds some of the experts, each rank of an etp group a slice of the same
experts. A dispatcher's `plan` says which rows it sends to whom; everything else is here.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.distributed.collectives import (
    AllToAll,
    AsyncRows,
    Pending,
    RowExchange,
    all_gather_rows,
    all_to_all_start,
    all_to_all_wait,
    exchange_rows,
    gather_parts,
    last_of_a_layer,
    reduce_scatter_rows,
)
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.base import Dispatcher, ExpertRows
from titan_moe.ops.move_rows import RowMap, combine_rows, gather_rows
from titan_moe.ops.permute_indices import permute_indices, row_map


class ExpertOrder(NamedTuple):
    """Maps from the rows of all ranks of the etp group to padded expert-major order."""

    rows: RowMap
    weights: RowMap
    offsets_E: Tensor


class Hop(NamedTuple):
    """Received rows copied on to other ranks."""

    copies: RowMap
    exchange: AllToAll


class Exchanges(NamedTuple):
    """The exchanges of a dispatch, known once the ranks have exchanged their counts."""

    rows: RowExchange
    weights: RowExchange
    """The exchange of routing weights. It has more entries than `rows` where a row travels once for
    several experts."""
    rows_gathered: list[int]
    """Rows of each rank of the etp group."""
    weights_gathered: list[int]
    expert_order: Pending[ExpertOrder]
    second_hop: Pending[Hop] | None = None


class ExchangePlan(NamedTuple):
    """The maps and exchanges that move rows and routing weights."""

    rows: RowMap
    """Tokens to the rows that are sent."""
    weights: RowMap
    """(token, k) slots to the weights that are sent."""
    exchanges: Pending[Exchanges]
    dropped: Tensor | None = None
    num_rows: Callable[[], int] | None = None
    """Returns the number of rows sent, if `rows` has room for more; waits for `exchanges`."""


class RowsInFlight(NamedTuple):
    """Rows and weights between `send` and `receive`."""

    x_ND: AsyncRows
    weights_N1: AsyncRows


class ExchangeDispatcher(Dispatcher):
    """Rows and their routing weights: all-to-all over ep, then all-gather over etp; and back.

    Args:
        ep_group: the ranks that hold the other experts.
        etp_group: the ranks that hold the other slices of the same experts.
    """

    def __init__(self, ep_group: ProcessGroup, etp_group: ProcessGroup, config: MoEConfig) -> None:
        self.ep_group, self.etp_group = ep_group, etp_group
        self.num_local = config.num_experts // ep_group.size()
        self.top_k, self.row_alignment = config.top_k, config.row_alignment

    def dropped(self, plan: ExchangePlan) -> Tensor | None:
        return plan.dropped

    def send(self, x_TD: Tensor, weights_TK: Tensor, plan: ExchangePlan) -> RowsInFlight:
        # Before `exchanges` are waited for: gathering overlaps with the exchange of counts.
        weights_N1 = gather_rows(weights_TK.reshape(-1, 1), plan.weights)
        x_ND = gather_rows(x_TD, plan.rows, plan.num_rows)
        exchanges = plan.exchanges.wait()
        # Weights first: rows are waited for before them, in the backward too, so that one turn is
        # passed on for both.
        weights = all_to_all_start(weights_N1, exchanges.weights)
        return RowsInFlight(all_to_all_start(x_ND, exchanges.rows, self.turns), weights)

    def receive(self, sent: RowsInFlight, plan: ExchangePlan) -> ExpertRows:
        exchanges = plan.exchanges.wait()
        # Before the rows are waited for: made as they travel.
        order = exchanges.expert_order.wait()
        x_ND = all_to_all_wait(sent.x_ND, exchanges.rows, self.turns)
        weights_N1 = all_to_all_wait(sent.weights_N1, exchanges.weights)
        if exchanges.second_hop is not None:
            hop = exchanges.second_hop.wait()
            x_ND = exchange_rows(gather_rows(x_ND, hop.copies), hop.exchange)
        if self.etp_group.size() > 1:
            x_ND = all_gather_rows(x_ND, exchanges.rows_gathered, self.etp_group)
            weights_N1 = all_gather_rows(weights_N1, exchanges.weights_gathered, self.etp_group)
        return ExpertRows(
            x_RD=gather_rows(x_ND, order.rows),
            weights_R=gather_rows(weights_N1, order.weights).flatten(),
            offsets_E=order.offsets_E,
        )

    def combine_start(self, y_RD: Tensor, plan: ExchangePlan) -> AsyncRows:
        exchanges = plan.exchanges.wait()
        y_ND = combine_rows(y_RD, exchanges.expert_order.wait().rows)
        with last_of_a_layer():
            if self.etp_group.size() > 1:
                y_ND = reduce_scatter_rows(y_ND, exchanges.rows_gathered, self.etp_group)
            if exchanges.second_hop is not None:
                hop = exchanges.second_hop.wait()
                y_ND = combine_rows(exchange_rows(y_ND, hop.exchange.reverse()), hop.copies)
            return all_to_all_start(y_ND, exchanges.rows.reverse(), self.turns)

    def combine_wait(self, home: AsyncRows, plan: ExchangePlan) -> Tensor:
        exchanges = plan.exchanges.wait()
        y_ND = all_to_all_wait(home, exchanges.rows.reverse(), self.turns)
        return combine_rows(y_ND, plan.rows)

    def gather_counts(self, counts: Tensor) -> Tensor:
        """The counts of all Q ranks of the etp group: [Q, *counts.shape]."""
        if self.etp_group.size() == 1:
            return counts[None]
        return gather_parts(counts, self.etp_group)

    def expert_order(self, counts_PE: Tensor, num_rows: int, num_local: int) -> ExpertOrder:
        """Returns the order of rows that are sent once for each expert, and of their weights.

        Args:
            counts_PE: rows by the rank that sent them and by expert; experts after the first
                `num_local` are rows that nothing reads.
        """
        permuted = permute_indices(counts_PE, num_rows, self.row_alignment)
        rows = row_map(permuted)
        return ExpertOrder(rows, rows, permuted.offsets_E[:num_local])
