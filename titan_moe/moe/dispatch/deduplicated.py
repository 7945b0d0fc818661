"""The deduplicating dispatcher: a token is sent once to each rank that holds experts of its own.

There it is copied to its experts' rows, and their weighted outputs are added up before one row is
sent back, where the ranks' rows are added. Of each of the T*K (token, expert) choices only its
routing weight and the number of its row are sent, 4 to 8 bytes beside a row's thousands.

Where an ep group spans several nodes, a token is sent once to each node, to the rank in the place
of its own rank there, and from that rank on to the node's ranks. Outputs are added up on that rank
before they leave the node. (Hierarchical dispatch, as in DeepSeek's DeepEP library and arXiv
2412.19437, section 3.2.2; the planning by one exchange of counts is ours.)
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.distributed.collectives import AllToAll, Pending, exchange_counts, to_host
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.exchange import (
    ExchangeDispatcher,
    ExchangePlan,
    Exchanges,
    ExpertOrder,
    Hop,
)
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


class _Draft(NamedTuple):
    """The inputs of the exchanges that are known before the counts arrive."""

    copies: RowMap
    """Copies of this rank's tokens, one per rank or node; with room for more in `source_R`."""
    copies_P: Tensor
    """Number of copies for each rank or node."""
    reached_TP: Tensor | None
    """True for the ranks that each token reaches; None without nodes."""
    slot_N: Tensor
    """The slots of `copies_to_ranks` in the order of experts."""
    num_tokens: int


class DeduplicatedDispatcher(ExchangeDispatcher):
    """Exchanges rows like `AllToAllDispatcher`, but sends a token once to each rank or node.

    Sums are in a fixed order: on the experts' rank by k, on the way back by rank. In narrow types
    each rank's sum is rounded once more than the standard dispatcher would, to be sent.

    Args:
        nodes: None if all of the ep group, or each rank of it alone, are on one node.
    """

    def __init__(
        self,
        ep_group: ProcessGroup,
        etp_group: ProcessGroup,
        config: MoEConfig,
        nodes: Nodes | None = None,
    ) -> None:
        super().__init__(ep_group, etp_group, config)
        self.nodes = nodes

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

    def plan(self, experts_TK: Tensor, counts_E: Tensor) -> ExchangePlan:
        degree, num_local = self.ep_group.size(), self.num_local
        *copies, slots_TK, copies_P = copies_to_ranks(experts_TK, num_local, degree)
        # Exchanged first: choices by expert, rows, and what nodes need to know.
        counts, reached_TP = [counts_E.view(degree, -1), copies_P[:, None]], None
        if self.nodes is not None:
            reached_TP = reached_ranks(experts_TK, num_local, degree)
            counts.append(self.nodes.counts_to_send(reached_TP))
            size = self.nodes.within.size()
            *copies, _, copies_P = copies_to_ranks(experts_TK, num_local * size, degree // size)
        sent_PX = torch.cat(counts, 1)
        received = exchange_counts(sent_PX, self.ep_group)

        _, slots = sort_by_expert(experts_TK, len(counts_E))
        slot_N = slots_TK.flatten()[slots.source_R]
        draft = _Draft(RowMap(*copies), copies_P, reached_TP, slot_N, len(experts_TK))
        exchanges = Pending(lambda: self._exchanges(draft, sent_PX, received.wait()))
        num_rows = partial(_num_sent, exchanges)
        return ExchangePlan(draft.copies, slots, exchanges, num_rows=num_rows)

    def _exchanges(self, draft: _Draft, sent_PX: Tensor, received_PX: Tensor) -> Exchanges:
        num_local = self.num_local
        gathered_QPX = self.gather_counts(received_PX[:, : num_local + 1])
        counts_QPE, rows_QP = gathered_QPX[..., :num_local], gathered_QPX[..., num_local]
        if self.ep_group.size() == 1:
            sizes = self._local_sizes(draft)
        else:
            by_nodes = []
            if self.nodes is not None:
                by_nodes = self.nodes.counts_received(
                    received_PX[:, num_local + 1 :], received_PX[:, num_local]
                )
            # Host sync, once per layer: collectives of rows take their sizes as Python ints.
            sizes = to_host(
                draft.copies_P,
                received_PX[:, num_local],
                sent_PX[:, :num_local].sum(1),
                received_PX[:, :num_local].sum(1),
                rows_QP.sum(1),
                counts_QPE.sum((1, 2)),
                *by_nodes,
            )
        sent, received, choices_sent, choices_received, rows_gathered, choices_gathered = sizes[:6]
        rows, second_hop = AllToAll(sent, received, self.ep_group), None
        if self.nodes is not None:
            from_nodes, onward, through = sizes[6:]
            rows = AllToAll(sent, from_nodes, self.nodes.across)
            second_hop = self._second_hop(draft, rows, onward, through)
        slot_N = exchange_counts(draft.slot_N, self.ep_group, choices_sent, choices_received)

        def order() -> ExpertOrder:
            return self._order(slot_N.wait(), counts_QPE, rows_QP, rows_gathered, choices_gathered)

        return Exchanges(
            rows=rows,
            weights=AllToAll(choices_sent, choices_received, self.ep_group),
            rows_gathered=rows_gathered,
            weights_gathered=choices_gathered,
            expert_order=Pending(order),
            second_hop=second_hop,
        )

    def _local_sizes(self, draft: _Draft) -> list[list[int]]:
        """Returns sizes for an ep group of one rank, whose etp ranks have equally many tokens."""
        tokens, choices, slices = draft.num_tokens, len(draft.slot_N), self.etp_group.size()
        own = [[tokens], [tokens], [choices], [choices]]
        return [*own, [tokens] * slices, [choices] * slices]

    def _second_hop(
        self, draft: _Draft, first: AllToAll, sent: list[int], received: list[int]
    ) -> Pending[Hop]:
        """Returns the hop from this rank to the others of its node, which the senders decide."""
        assert self.nodes is not None and draft.reached_TP is not None
        within, num_copies = self.nodes.within, sum(first.sent)
        node_M = torch.arange(len(first.sent), device=draft.reached_TP.device).repeat_interleave(
            draft.copies_P, output_size=num_copies
        )
        token_M = draft.copies.source_R[:num_copies]
        reached_MG = self.nodes.by_node(draft.reached_TP)[token_M, node_M].byte()
        onward = exchange_counts(reached_MG, first.group, first.sent, first.received)

        def make() -> Hop:
            copies = copy_to_ranks(onward.wait().bool(), min(self.top_k, within.size()))
            copies = copies._replace(source_R=copies.source_R[: sum(sent)])
            return Hop(copies, AllToAll(sent, received, within))

        return Pending(make)

    def _order(
        self,
        slot_N: Tensor,
        counts_QPE: Tensor,
        rows_QP: Tensor,
        rows_gathered: list[int],
        choices_gathered: list[int],
    ) -> ExpertOrder:
        """Returns the map from the gathered rows to padded expert-major order.

        Args:
            slot_N: `_Draft.slot_N` of the choices that were sent here.
        """
        num_choices, top_k = sum(choices_gathered), self.top_k
        if (slices := len(choices_gathered)) > 1:
            own = [len(slot_N)] * slices
            slot_N = exchange_counts(
                slot_N.repeat(slices), self.etp_group, own, choices_gathered
            ).wait()
        counts_PE = counts_QPE.flatten(0, 1)
        permuted = permute_indices(counts_PE, num_choices, self.row_alignment)
        start_N = self._row_starts(rows_QP).repeat_interleave(
            counts_PE.sum(1), output_size=num_choices
        )
        slot_N = torch.add(slot_N, start_N, alpha=top_k)
        rows = start_N.new_full((sum(rows_gathered) * top_k,), -1)
        rows_MK = rows.scatter_(0, slot_N, permuted.position_R).view(-1, top_k)
        return ExpertOrder(
            rows=RowMap(follow(slot_N // top_k, permuted.source_R), rows_MK),
            weights=row_map(permuted),
            offsets_E=permuted.offsets_E,
        )

    def _row_starts(self, rows_QP: Tensor) -> Tensor:
        """Returns the start of each sending rank's rows among the gathered rows: [Q * P].

        Rows lie in the order in which they were received: rank by rank, or by the rank on this node
        that they came through, and of those by node.
        """
        if self.nodes is None:
            return starts(rows_QP.flatten())
        slices, size = len(rows_QP), self.nodes.within.size()
        rows_QGA = rows_QP.view(slices, -1, size).transpose(1, 2)
        first_QGA = starts(rows_QGA.flatten()).view_as(rows_QGA)
        return first_QGA.transpose(1, 2).flatten()


def _num_sent(exchanges: Pending[Exchanges]) -> int:
    rows = exchanges.wait().rows
    assert isinstance(rows, AllToAll)
    return sum(rows.sent)
