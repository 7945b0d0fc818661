"""The deduplicating dispatcher: a token travels once to each rank that holds experts of its own.

There it is copied to its experts' rows, and their weighted outputs are added up before one row goes
home, where the ranks' rows are added. Of each of the T*K (token, expert) choices only its routing
weight and the number of its row travel, 4 to 8 bytes beside a row's thousands.

Where an ep group spans several nodes, a token travels once to each node, to the rank that stands
there where its own rank stands here, and from that rank on to the node's ranks. Outputs are added
up on that rank before they leave the node. (Hierarchical dispatch, as in DeepSeek's DeepEP library
and arXiv 2412.19437, section 3.2.2; the planning by one exchange of counts is ours.)
"""

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
from titan_moe.distributed.numbers import Told, tell, tell_table, to_host
from titan_moe.moe.dispatch.all_to_all import reached
from titan_moe.moe.dispatch.base import (
    Dispatcher,
    ExpertRows,
    Later,
    SortedTokens,
    count_experts,
    follow,
    pad_to_alignment,
    sort_by_expert,
)
from titan_moe.moe.dispatch.nodes import Nodes
from titan_moe.moe.permute import gather_rows
from titan_moe.moe.ragged import (
    Copies,
    Spread,
    add_ragged,
    copy_ragged,
    most_first,
    spread,
    starts,
)


class Hop(NamedTuple):
    """One exchange of rows, each copied to every rank that it goes to."""

    copies: Copies
    sent: list[int]
    received: list[int]
    group: ProcessGroup


class Arrival(NamedTuple):
    """What becomes known when the ranks' counts have arrived."""

    first: Hop
    second: Later[Hop] | None
    """From the rank on a node to its other ranks."""
    choices_sent: list[int]
    choices_received: list[int]
    rows_gathered: list[int]
    """Rows of each rank of the etp group."""
    choices_gathered: list[int]
    expansion: Later["Expansion"]


class Expansion(NamedTuple):
    """From gathered rows to padded expert-major order."""

    copies: Copies
    choice_R: Tensor
    """The gathered (token, expert) choice of each padded row, -1 for padding."""
    position_N1: Tensor
    """The padded row of each gathered choice."""
    offsets_E: Tensor


class DeduplicatedPlan(NamedTuple):
    """Where rows go."""

    tokens: SortedTokens
    arrival: Later[Arrival]


class RowsUnderWay(NamedTuple):
    """Rows and their choices' weights on their way over ep."""

    x_MD: Travelling
    weights_N1: Travelling


class _Draft(NamedTuple):
    """What a plan is made of while counts travel."""

    spread: Spread
    """Of this rank's tokens, to ranks or to nodes."""
    reached_TP: Tensor
    row_N: Tensor
    """int32: of each choice, in the order of experts, its row among those that its rank is sent
    from here, times J, plus how many of that row's choices come before it."""


class DeduplicatedDispatcher(Dispatcher):
    """As `AllToAllDispatcher`, but for how often a row travels.

    Sums are in a fixed order: on the experts' rank by k, on the way home by rank. In narrow types
    each rank's sum is rounded once more than the standard dispatcher would, to travel.

    Args:
        top_k: experts of a token, all different.
        nodes: left out if all of the ep group, or each rank of it alone, are on one node.
    """

    def __init__(
        self,
        ep_group: ProcessGroup,
        etp_group: ProcessGroup,
        *,
        num_local: int,
        row_alignment: int,
        top_k: int,
        nodes: Nodes | None = None,
    ) -> None:
        self.ep_group, self.etp_group = ep_group, etp_group
        self.num_local, self.row_alignment = num_local, row_alignment
        self.top_k, self.nodes = top_k, nodes
        self.turns: Turns = NoTurns()
        self._most_here = min(top_k, num_local)
        """J: experts of a token on one rank."""

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        """As the protocol says; where there are nodes, of what travels between nodes alone."""
        reached_TP = self._reached(experts_TK)
        if self.nodes is not None:
            on_nodes_A = self.nodes.by_node(reached_TP).any(2).sum(0)
            sent = on_nodes_A.sum() - on_nodes_A[self.nodes.across.rank()]
        else:
            rows_P = reached_TP.sum(0)
            sent = self.etp_group.size() * rows_P.sum() - rows_P[self.ep_group.rank()]
        return sent.expand(2)

    def plan(self, experts_TK: Tensor, counts_E: Tensor) -> DeduplicatedPlan:
        degree, most = self.ep_group.size(), self._most_here
        destination_TK = experts_TK // self.num_local
        reached_TP = self._reached(experts_TK)
        same_TKK = destination_TK[:, :, None] == destination_TK[:, None]
        nth_TK = same_TKK.tril(-1).sum(2)
        # What ranks tell each other: choices by expert, rows by how many choices they have.
        nth_PJ = count_experts(destination_TK * most + nth_TK, degree * most).view(degree, most)
        told = [counts_E.view(degree, -1), nth_PJ]
        if self.nodes is not None:
            told.append(self.nodes.told(reached_TP, min(self.top_k, self.nodes.within.size())))
        told_P = torch.cat(told, 1)
        heard = tell_table(told_P, self.ep_group)

        tokens = sort_by_expert(experts_TK)
        row_TK = (reached_TP.cumsum(0) - 1).gather(1, destination_TK) * most + nth_TK
        if self.nodes is None:
            spread_out = spread(reached_TP, min(self.top_k, degree))
        else:
            on_nodes_TA = self.nodes.by_node(reached_TP).any(2)
            spread_out = spread(on_nodes_TA, min(self.top_k, on_nodes_TA.shape[1]))
        draft = _Draft(spread_out, reached_TP, row_TK.flatten()[tokens.slot_N].int())
        return DeduplicatedPlan(tokens, Later(lambda: self._arrive(draft, told_P, heard.heard())))

    def _arrive(self, draft: _Draft, told_P: Tensor, heard_P: Tensor) -> Arrival:
        num_local, wide = self.num_local, self.num_local + self._most_here
        heard_QP = heard_P[None, :, :wide]
        if self.etp_group.size() > 1:
            heard_QP = gather_parts(heard_P[:, :wide], self.etp_group)
        counts_QPE, nth_QPJ = heard_QP[..., :num_local], heard_QP[..., num_local:]
        rows_QP, nth_J = nth_QPJ[..., 0], nth_QPJ.sum((0, 1))
        by_nodes = []
        if self.nodes is not None:
            by_nodes = self.nodes.heard(heard_P[:, wide:], heard_P[:, num_local])
        # Host sync, once per layer: collectives of rows want their sizes as Python ints.
        sizes = self._without_asking(draft) or to_host(
            draft.spread.sent_P,
            draft.spread.sizes_I,
            told_P[:, :num_local].sum(1),
            heard_P[:, :num_local].sum(1),
            heard_P[:, num_local],
            rows_QP.sum(1),
            counts_QPE.sum((1, 2)),
            nth_J,
            *by_nodes,
        )
        sent, num_copies, choices_out, choices_in, rows_in, *sizes = sizes
        rows_gathered, choices_gathered, num_nth, *sizes = sizes
        copies = draft.spread.copies(num_copies)
        first, second = Hop(copies, sent, rows_in, self.ep_group), None
        if self.nodes is not None:
            on_node, *onward = sizes
            first = Hop(copies, sent, on_node, self.nodes.across)
            second = self._second_hop(draft, first, *onward)
        row_N = tell(draft.row_N, choices_out, choices_in, self.ep_group)

        def expand() -> Expansion:
            return self._expand(row_N, counts_QPE, nth_QPJ, choices_gathered, num_nth)

        return Arrival(
            first=first,
            second=second,
            choices_sent=choices_out,
            choices_received=choices_in,
            rows_gathered=rows_gathered,
            choices_gathered=choices_gathered,
            expansion=Later(expand),
        )

    def _without_asking(self, draft: _Draft) -> list[list[int]] | None:
        """The sizes where all experts are on this rank, and those who share them have as many
        tokens."""
        if self.ep_group.size() > 1:
            return None
        tokens, choices, slices = len(draft.reached_TP), len(draft.row_N), self.etp_group.size()
        alone = [[tokens], [tokens], [choices], [choices], [tokens]]
        nth = [slices * tokens] * self._most_here
        return [*alone, [tokens] * slices, [choices] * slices, nth]

    def _expand(
        self,
        told: Told,
        counts_QPE: Tensor,
        nth_QPJ: Tensor,
        choices_gathered: list[int],
        sizes: list[int],
    ) -> Expansion:
        """Where the gathered rows' copies go.

        Args:
            told: `_Draft.row_N` of the choices that come here.
            sizes: as `Copies.sizes`.
        """
        most, num_rows, num_choices = self._most_here, sizes[0], sum(sizes)
        row_N = told.heard()
        if (slices := len(choices_gathered)) > 1:
            own = [len(row_N)] * slices
            row_N = tell(row_N.repeat(slices), own, choices_gathered, self.etp_group).heard()
        row_N, counts_PE = row_N.long(), counts_QPE.flatten(0, 1)
        permuted = pad_to_alignment(counts_PE, num_choices, self.row_alignment)
        shift_N = self._row_starts(nth_QPJ[..., 0]).repeat_interleave(
            counts_PE.sum(1), output_size=num_choices
        )
        nth_N, row_N = row_N % most, row_N // most + shift_N

        has_MJ = row_N.new_zeros(num_rows * most).scatter_(0, row_N * most + nth_N, 1)
        order_M = most_first(has_MJ.view(num_rows, most).sum(1))
        index_N = starts(nth_QPJ.sum((0, 1)))[nth_N] + order_M[row_N]
        place_N = torch.empty_like(row_N).scatter_(0, index_N, permuted.position_R)
        return Expansion(
            copies=Copies(follow(row_N, permuted.source_R), place_N, sizes, order_M),
            choice_R=permuted.source_R,
            position_N1=permuted.position_R[:, None],
            offsets_E=permuted.offsets_E,
        )

    def send(self, x_TD: Tensor, weights_TK: Tensor, plan: DeduplicatedPlan) -> RowsUnderWay:
        tokens = plan.tokens
        weights_N1 = gather_rows(
            weights_TK.reshape(-1, 1), tokens.slot_N, tokens.rows_TK.view(-1, 1)
        )
        arrival = plan.arrival()
        x_MD = start_rows(copy_ragged(x_TD, arrival.first.copies), self._out(arrival.first))
        return RowsUnderWay(x_MD, start_rows(weights_N1, self._choices_out(arrival)))

    def receive(self, sent: RowsUnderWay, plan: DeduplicatedPlan) -> ExpertRows:
        arrival = plan.arrival()
        x_MD = wait_rows(sent.x_MD, self._out(arrival.first))
        weights_N1 = wait_rows(sent.weights_N1, self._choices_out(arrival))
        if arrival.second is not None:
            hop = arrival.second()
            out = self._out(hop)
            x_MD = wait_rows(start_rows(copy_ragged(x_MD, hop.copies), out), out)
        if len(arrival.rows_gathered) > 1:
            x_MD = all_gather_rows(x_MD, arrival.rows_gathered, self.etp_group)
            weights_N1 = all_gather_rows(weights_N1, arrival.choices_gathered, self.etp_group)
        expansion = arrival.expansion()
        weights_R1 = gather_rows(weights_N1, expansion.choice_R, expansion.position_N1)
        return ExpertRows(
            x_RD=copy_ragged(x_MD, expansion.copies),
            weights_R=weights_R1[:, 0],
            offsets_E=expansion.offsets_E,
        )

    def combine(self, y_RD: Tensor, plan: DeduplicatedPlan) -> Tensor:
        arrival = plan.arrival()
        y_MD = add_ragged(y_RD, arrival.expansion().copies)
        if len(arrival.rows_gathered) > 1:
            y_MD = reduce_scatter_rows(y_MD, arrival.rows_gathered, self.etp_group)
        hops = [arrival.first] if arrival.second is None else [arrival.second(), arrival.first]
        for hop in hops:
            home = self._out(hop).reverse()
            y_MD = add_ragged(wait_rows(start_rows(y_MD, home), home), hop.copies)
        return y_MD

    def _out(self, hop: Hop) -> Exchange:
        return Exchange(hop.sent, hop.received, hop.group, self.turns)

    def _choices_out(self, arrival: Arrival) -> Exchange:
        return Exchange(arrival.choices_sent, arrival.choices_received, self.ep_group)

    def _reached(self, experts_TK: Tensor) -> Tensor:
        return reached(experts_TK // self.num_local, self.ep_group.size())

    def _second_hop(
        self, draft: _Draft, first: Hop, sizes: list[int], sent: list[int], received: list[int]
    ) -> Later[Hop]:
        """From this rank to the others of its node; the senders say to which."""
        assert self.nodes is not None
        within = self.nodes.within
        node_M = torch.arange(len(first.sent), device=draft.reached_TP.device).repeat_interleave(
            draft.spread.sent_P, output_size=sum(first.sent)
        )
        reached_MG = self.nodes.by_node(draft.reached_TP)[first.copies.source_R, node_M].byte()
        onward = tell(reached_MG, first.sent, first.received, first.group)

        def make() -> Hop:
            spread_out = spread(onward.heard().bool(), len(sizes))
            return Hop(spread_out.copies(sizes), sent, received, within)

        return Later(make)

    def _row_starts(self, rows_QP: Tensor) -> Tensor:
        """Where the rows that each rank sent begin among the gathered ones: [Q * P].

        They lie in the order in which they were handed on: rank by rank, or by the rank on this
        node that they came through, and of those by node.
        """
        if self.nodes is None:
            return starts(rows_QP.flatten())
        slices, size = len(rows_QP), self.nodes.within.size()
        rows_QGA = rows_QP.view(slices, -1, size).transpose(1, 2)
        first_QGA = starts(rows_QGA.flatten()).view_as(rows_QGA)
        return first_QGA.transpose(1, 2).flatten()
