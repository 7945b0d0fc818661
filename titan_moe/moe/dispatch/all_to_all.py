"""The standard dispatcher: each of the T*K rows travels to its expert and back."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.distributed.collectives import (
    Exchange,
    NoTurns,
    Travelling,
    Turns,
    all_gather_rows,
    gather_parts,
    reduce_scatter_rows,
    start_rows,
    wait_rows,
)
from titan_moe.distributed.numbers import tell_table, to_host
from titan_moe.moe.dispatch.base import (
    Dispatcher,
    ExpertRows,
    Later,
    SortedTokens,
    pad_to_alignment,
    sort_by_expert,
)
from titan_moe.moe.permute import combine_rows, gather_rows


class Sizes(NamedTuple):
    """How many rows travel, as the host must know them."""

    sent: list[int]
    """Rows for each rank of the ep group."""
    received: list[int]
    gathered: list[int]
    """Rows that each rank of the etp group received."""


class Arrival(NamedTuple):
    """What becomes known when the ranks' counts have arrived."""

    sizes: Sizes
    source_R: Tensor
    """The gathered row of each padded row, -1 for padding."""
    position_N1: Tensor
    """The padded row of each gathered row."""
    offsets_E: Tensor


class AllToAllPlan(NamedTuple):
    """Where rows go: to their expert's ranks, then into padded expert-major order there."""

    tokens: SortedTokens
    arrival: Later[Arrival]


class RowsUnderWay(NamedTuple):
    """Rows and weights on their way over ep, not to be read yet."""

    x_ND: Travelling
    weights_N1: Travelling


class AllToAllDispatcher(Dispatcher):
    """Rows and their routing weights: all-to-all over ep, then all-gather over etp; and back.

    `turns` is chosen when the model is built: an overlapped pipeline schedule replaces it, and
    computes something else wherever rows travel.

    Args:
        ep_group: the ranks that hold the other experts.
        etp_group: the ranks that hold the other slices of the same experts.
        num_local: experts per rank.
        row_alignment: each expert's rows are padded to a multiple of this.
    """

    def __init__(
        self, ep_group: ProcessGroup, etp_group: ProcessGroup, *, num_local: int, row_alignment: int
    ) -> None:
        self.ep_group = ep_group
        self.etp_group = etp_group
        self.num_local = num_local
        self.row_alignment = row_alignment
        self.turns: Turns = NoTurns()

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        """As the protocol says, for the whole way to the experts, gathering over etp included.

        All etp ranks that hold an expert's slices want its tokens' rows. A row of an expert
        elsewhere crosses the wire once over ep and etp - 1 times over etp; a row of an own expert,
        the latter only. A destination rank that a token reaches for several experts counts for as
        many rows, and for one pair.
        """
        sent_P = counts_E.view(-1, self.num_local).sum(1)
        reached_TP = reached(experts_TK // self.num_local, len(sent_P))
        rows_2P = torch.stack([sent_P, reached_TP.sum(0)])
        return self.etp_group.size() * rows_2P.sum(1) - rows_2P[:, self.ep_group.rank()]

    def plan(self, experts_TK: Tensor, counts_E: Tensor) -> AllToAllPlan:
        sent_PE = counts_E.view(-1, self.num_local)
        received = tell_table(sent_PE, self.ep_group)
        tokens, num_rows = sort_by_expert(experts_TK), experts_TK.numel()
        return AllToAllPlan(
            tokens, Later(lambda: self._arrive(sent_PE, received.heard(), num_rows))
        )

    def _arrive(self, sent_PE: Tensor, received_PE: Tensor, num_rows: int) -> Arrival:
        gathered_PE, slices = received_PE, self.etp_group.size()
        if slices > 1:
            gathered_PE = gather_parts(received_PE, self.etp_group).flatten(0, 1)
        if len(sent_PE) == 1:  # Every rank keeps all rows of as many tokens.
            sizes = Sizes([num_rows], [num_rows], [num_rows] * slices)
        else:
            # Host sync, once per layer: collectives of rows want their sizes as Python ints.
            gathered_P = gathered_PE.view(slices, -1).sum(1)
            sizes = Sizes(*to_host(sent_PE.sum(1), received_PE.sum(1), gathered_P))
        permuted = pad_to_alignment(gathered_PE, sum(sizes.gathered), self.row_alignment)
        return Arrival(
            sizes=sizes,
            source_R=permuted.source_R,
            position_N1=permuted.position_R[:, None],
            offsets_E=permuted.offsets_E,
        )

    def send(self, x_TD: Tensor, weights_TK: Tensor, plan: AllToAllPlan) -> RowsUnderWay:
        tokens = plan.tokens
        # Before the plan's sizes are asked for: rows are gathered while counts travel.
        x_ND = gather_rows(x_TD, tokens.token_N, tokens.rows_TK)
        weights_N1 = gather_rows(
            weights_TK.reshape(-1, 1), tokens.slot_N, tokens.rows_TK.view(-1, 1)
        )
        out = self._out(plan)
        without_turns = out._replace(turns=NoTurns())
        return RowsUnderWay(start_rows(x_ND, out), start_rows(weights_N1, without_turns))

    def receive(self, sent: RowsUnderWay, plan: AllToAllPlan) -> ExpertRows:
        out = self._out(plan)
        x_ND = wait_rows(sent.x_ND, out)
        weights_N1 = wait_rows(sent.weights_N1, out._replace(turns=NoTurns()))
        return ExpertRows(
            x_RD=self._to_experts(x_ND, plan),
            weights_R=self._to_experts(weights_N1, plan)[:, 0],
            offsets_E=plan.arrival().offsets_E,
        )

    def combine(self, y_RD: Tensor, plan: AllToAllPlan) -> Tensor:
        arrival, tokens = plan.arrival(), plan.tokens
        y_ND = combine_rows(y_RD, arrival.position_N1, arrival.source_R)
        if len(arrival.sizes.gathered) > 1:
            y_ND = reduce_scatter_rows(y_ND, arrival.sizes.gathered, self.etp_group)
        home = self._out(plan).reverse()
        y_ND = wait_rows(start_rows(y_ND, home), home)
        return combine_rows(y_ND, tokens.rows_TK, tokens.token_N)

    def _out(self, plan: AllToAllPlan) -> Exchange:
        sizes = plan.arrival().sizes
        return Exchange(sizes.sent, sizes.received, self.ep_group, self.turns)

    def _to_experts(self, x_ND: Tensor, plan: AllToAllPlan) -> Tensor:
        arrival = plan.arrival()
        if len(arrival.sizes.gathered) > 1:
            x_ND = all_gather_rows(x_ND, arrival.sizes.gathered, self.etp_group)
        return gather_rows(x_ND, arrival.source_R, arrival.position_N1)


def reached(destination_TK: Tensor, degree: int) -> Tensor:
    """Whether a token has an expert on a rank: [T, P], bool."""
    reached_TP = destination_TK.new_zeros(len(destination_TK), degree, dtype=torch.bool)
    return reached_TP.scatter_(1, destination_TK, True)
