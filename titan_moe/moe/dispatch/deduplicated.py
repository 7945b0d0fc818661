"""The deduplicating dispatcher: a token is sent once to each rank that holds experts of its own.

There it is copied to its experts' rows, and their weighted outputs are added up before one row is
sent back, where the ranks' rows are added. Of each of the T*K (token, expert) choices only its
routing weight and the number of its row are sent, 4 to 8 bytes beside a row's thousands.

Where an ep group spans several nodes, a token is sent once to each node, to the rank in the place
of its own rank there, and from that rank on to the node's ranks. Outputs are added up on that rank
before they leave the node. (Hierarchical dispatch, as in DeepSeek's DeepEP library and arXiv
2412.19437, section 3.2.2; the planning by one exchange of counts is ours.)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.comm.collectives import AllToAll, InFlight, start_numbers, to_host
from titan_moe.moe.dispatch.exchange import Draft, ExchangeDispatcher, Hop, Order, Plan
from titan_moe.ops.move_rows import RowMap
from titan_moe.ops.permute_indices import (
    copies_to_ranks,
    copy_to_ranks,
    follow,
    permute_indices,
    reached_ranks,
    row_map,
    sort_by_expert,
    starts,
)


class Nodes(NamedTuple):
    """An ep group of A nodes of G ranks each."""

    across: ProcessGroup
    """The ranks in this rank's place on their nodes, node after node."""
    within: ProcessGroup
    """The ranks of this node."""

    def by_node(self, x_TP: Tensor) -> Tensor:
        """[T, P] -> [T, A, G]."""
        return x_TP.unflatten(1, (-1, self.within.size()))

    def counts_to_send(self, reached_TP: Tensor) -> Tensor:
        """Returns, for the ranks in this rank's place, how many of this rank's tokens go to their
        node and to each rank there, [P, 1 + G]; zeros for the other ranks."""
        reached_TAG = self.by_node(reached_TP)
        counts_AG = torch.cat([reached_TAG.any(2).sum(0)[:, None], reached_TAG.sum(0)], 1)
        sent_AG = counts_AG.new_zeros(len(counts_AG), self.within.size(), counts_AG.shape[1])
        sent_AG[:, self.within.rank()] = counts_AG
        return sent_AG.flatten(0, 1)

    def counts_received(self, received_P: Tensor, rows_P: Tensor) -> list[Tensor]:
        """Rows that come from each node [A]; of these, how many go on to each rank here [G]; rows
        that come here by way of each rank [G].

        Args:
            received_P: the `counts_to_send` of all ranks.
            rows_P: rows of each rank that are for this one.
        """
        size = self.within.size()
        received_A = received_P.unflatten(0, (-1, size))[:, self.within.rank()]
        through_G = rows_P.unflatten(0, (-1, size)).sum(0)
        return [received_A[:, 0], received_A[:, 1:].sum(0), through_G]


class Counts(NamedTuple):
    """Numbers that a rank tells each other rank, a row of a table for each."""

    choices_PE: Tensor
    """Choices of each of its experts."""
    copies_P: Tensor
    """Copies of tokens for it, one for all of a token's choices."""
    nodes_PX: Tensor
    """Numbers of `Nodes.counts_to_send`; no columns without nodes."""

    def table(self) -> Tensor:
        return torch.cat([self.choices_PE, self.copies_P[:, None], self.nodes_PX], 1)

    @staticmethod
    def of_table(table_PX: Tensor, num_local: int) -> "Counts":
        choices_PE, copies_P1, nodes_PX = table_PX.tensor_split([num_local, num_local + 1], 1)
        return Counts(choices_PE, copies_P1[:, 0], nodes_PX)


class Sizes(NamedTuple):
    """Sizes of all exchanges, as Python ints."""

    copies_sent: list[int]
    """Copies for each rank, or with nodes for each node."""
    copies_received: list[int]
    choices_sent: list[int]
    choices_received: list[int]
    copies_gathered: list[int]
    """Copies of each rank of the etp group, and its choices."""
    choices_gathered: list[int]
    from_nodes: list[int] = []  # noqa: RUF012
    """Numbers of `Nodes.counts_received`."""
    onward: list[int] = []  # noqa: RUF012
    through: list[int] = []  # noqa: RUF012


@dataclass(frozen=True)
class DeduplicatedDraft(Draft):
    """A draft whose rows are copies of tokens, one for each rank or node that they reach."""

    copies_P: Tensor
    """Number of copies for each rank or node."""
    slot_N: Tensor
    """The slots of `copies_to_ranks` in the order of experts."""
    reached_TP: Tensor | None
    """True for the ranks that each token reaches; None without nodes."""


@dataclass(frozen=True, kw_only=True)
class DeduplicatedPlan(Plan):
    """A plan with what the order of the received rows follows from."""

    slots: InFlight
    """Slots of `DeduplicatedDraft` under way, of the choices that come here."""
    copies_QP: Tensor
    """Copies that each rank of each etp rank's ep group sends."""
    onward: InFlight | None = None
    """Ranks of this node that each copy goes on to, under way."""
    second_hop: AllToAll | None = None


@dataclass(eq=False)
class DeduplicatedDispatcher(ExchangeDispatcher):
    """Exchanges rows like `AllToAllDispatcher`, but sends a token once to each rank or node.

    Sums are in a fixed order: on the experts' rank by k, on the way back by rank. In narrow types
    each rank's sum is rounded once more than the standard dispatcher would, to be sent.

    Args:
        nodes: None if all of the ep group, or each rank of it alone, are on one node.
    """

    nodes: Nodes | None = None

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        """Counts rows sent to other ranks, or with nodes to other nodes only: [2] int64, equal."""
        reached_TP = reached_ranks(experts_TK, self.num_local, self.ep_group.size())
        if self.nodes is not None:
            on_nodes_A = self.nodes.by_node(reached_TP).any(2).sum(0)
            sent = on_nodes_A.sum() - on_nodes_A[self.nodes.across.rank()]
        else:
            rows_P = reached_TP.sum(0)
            sent = self.etp_group.size() * rows_P.sum() - rows_P[self.ep_group.rank()]
        return sent.expand(2)

    def start_counts(self, experts_TK: Tensor, counts_E: Tensor) -> DeduplicatedDraft:
        degree, num_local = self.ep_group.size(), self.num_local
        sent_PE, reached_TP = counts_E.view(degree, -1), None
        *copies, slots_TK, copies_P = copies_to_ranks(experts_TK, num_local, degree)
        sent = Counts(sent_PE, copies_P, sent_PE[:, :0])
        if self.nodes is not None:
            reached_TP = reached_ranks(experts_TK, num_local, degree)
            sent = sent._replace(nodes_PX=self.nodes.counts_to_send(reached_TP))
            size = self.nodes.within.size()
            *copies, _, copies_P = copies_to_ranks(experts_TK, num_local * size, degree // size)
        counts = start_numbers(sent.table(), AllToAll.of_table(self.ep_group))
        _, slots = sort_by_expert(experts_TK, len(counts_E))
        slot_N = slots_TK.flatten()[slots.source_R]
        return DeduplicatedDraft(
            RowMap(*copies), slots, sent_PE, counts, copies_P, slot_N, reached_TP
        )

    def sizes(self, draft: DeduplicatedDraft) -> DeduplicatedPlan:
        table_PX = draft.counts.wait()
        received = Counts.of_table(table_PX, self.num_local)
        gathered_QPX = self.gather_counts(table_PX[:, : self.num_local + 1])
        counts_QPE, copies_QP = gathered_QPX[..., :-1], gathered_QPX[..., -1]
        sizes = self._sizes(draft, received, counts_QPE, copies_QP)
        rows, onward, second_hop = AllToAll(*sizes[:2], self.ep_group), None, None
        if self.nodes is not None:
            rows = AllToAll(sizes.copies_sent, sizes.from_nodes, self.nodes.across)
            onward = self._start_onward(draft, rows)
            second_hop = AllToAll(sizes.onward, sizes.through, self.nodes.within)
        weights = AllToAll(sizes.choices_sent, sizes.choices_received, self.ep_group)
        return DeduplicatedPlan(
            num_rows=sum(rows.sent),
            rows=rows,
            weights=weights,
            rows_gathered=sizes.copies_gathered,
            weights_gathered=sizes.choices_gathered,
            counts_PE=counts_QPE.flatten(0, 1),
            slots=start_numbers(draft.slot_N, weights),
            copies_QP=copies_QP,
            onward=onward,
            second_hop=second_hop,
        )

    def _sizes(
        self, draft: DeduplicatedDraft, received: Counts, counts_QPE: Tensor, copies_QP: Tensor
    ) -> Sizes:
        if self.ep_group.size() == 1:  # All etp ranks have equally many tokens.
            copies, choices, slices = [len(draft.rows.rows_TK)], [len(draft.slot_N)], len(copies_QP)
            return Sizes(copies, copies, choices, choices, copies * slices, choices * slices)
        by_nodes: list[Tensor] = []
        if self.nodes is not None:
            by_nodes = self.nodes.counts_received(received.nodes_PX, received.copies_P)
        # Host sync, once per layer: collectives of rows take their sizes as Python ints.
        return Sizes(
            *to_host(
                draft.copies_P,
                received.copies_P,
                draft.sent_PE.sum(1),
                received.choices_PE.sum(1),
                copies_QP.sum(1),
                counts_QPE.sum((1, 2)),
                *by_nodes,
            )
        )

    def _start_onward(self, draft: DeduplicatedDraft, first: AllToAll) -> InFlight:
        """Tells the ranks that copies go to first where each goes on to, which their senders
        decide."""
        assert self.nodes is not None and draft.reached_TP is not None
        num_copies = sum(first.sent)
        node_M = torch.arange(len(first.sent), device=draft.reached_TP.device).repeat_interleave(
            draft.copies_P, output_size=num_copies
        )
        token_M = draft.rows.source_R[:num_copies]
        reached_MG = self.nodes.by_node(draft.reached_TP)[token_M, node_M].byte()
        return start_numbers(reached_MG, first)

    def order(self, plan: Plan) -> Order:
        """Returns the map from the gathered rows to padded expert-major order."""
        assert isinstance(plan, DeduplicatedPlan)
        hop = None
        if self.nodes is not None:
            assert plan.onward is not None and plan.second_hop is not None
            most = min(self.top_k, self.nodes.within.size())
            copies = copy_to_ranks(plan.onward.wait().bool(), most)
            sources = copies.source_R[: sum(plan.second_hop.sent)]
            hop = Hop(copies._replace(source_R=sources), plan.second_hop)
        slot_N, gathered = plan.slots.wait(), plan.weights_gathered
        num_choices, top_k = sum(gathered), self.top_k
        if (slices := len(gathered)) > 1:
            to_all = AllToAll([len(slot_N)] * slices, gathered, self.etp_group)
            slot_N = start_numbers(slot_N.repeat(slices), to_all).wait()
        permuted = permute_indices(plan.counts_PE, num_choices, self.row_alignment)
        start_N = self._row_starts(plan.copies_QP).repeat_interleave(
            plan.counts_PE.sum(1), output_size=num_choices
        )
        slot_N = torch.add(slot_N, start_N, alpha=top_k)
        rows = start_N.new_full((sum(plan.rows_gathered) * top_k,), -1)
        rows_MK = rows.scatter_(0, slot_N, permuted.position_R).view(-1, top_k)
        return Order(
            rows=RowMap(follow(slot_N // top_k, permuted.source_R), rows_MK),
            weights=row_map(permuted),
            offsets_E=permuted.offsets_E,
            hop=hop,
        )

    def _row_starts(self, copies_QP: Tensor) -> Tensor:
        """Returns the start of each sending rank's rows among the gathered rows: [Q * P].

        Rows lie in the order in which they were received: rank by rank, or by the rank on this node
        that they came through, and of those by node.
        """
        if self.nodes is None:
            return starts(copies_QP.flatten())
        slices, size = len(copies_QP), self.nodes.within.size()
        rows_QGA = copies_QP.view(slices, -1, size).transpose(1, 2)
        first_QGA = starts(rows_QGA.flatten()).view_as(rows_QGA)
        return first_QGA.transpose(1, 2).flatten()
