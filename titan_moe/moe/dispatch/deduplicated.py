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
from titan_moe.moe.dispatch.all_to_all import AllToAllDispatcher, ExchangeRoute
from titan_moe.ops.move_rows import RowMap
from titan_moe.ops.permute_indices import (
    Sorted,
    copies_to_ranks,
    copy_to_ranks,
    follow,
    permute_indices,
    reached_ranks,
    row_map,
    starts,
)


class Nodes(NamedTuple):
    """An ep group of A nodes of G ranks each."""

    across: ProcessGroup
    """The ranks in this rank's place on their nodes, node after node."""
    within: ProcessGroup
    """The ranks of this node."""

    def by_node(self, x_TP: Tensor) -> Tensor:
        """Views ranks by node: [T, P] -> [T, A, G]."""
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
        """Returns the rows that come from each node [A]; how many of them go on to each rank of
        this node [G]; and the rows that come here through each rank of this node [G].

        Args:
            received_P: the `counts_to_send` of all ranks.
            rows_P: rows that each rank sends to this one.
        """
        size = self.within.size()
        received_A = received_P.unflatten(0, (-1, size))[:, self.within.rank()]
        through_G = rows_P.unflatten(0, (-1, size)).sum(0)
        return [received_A[:, 0], received_A[:, 1:].sum(0), through_G]


class DeduplicatedRoute(ExchangeRoute):
    """A route whose rows are copies of tokens, one for each rank or node that they reach."""

    copies_P: Tensor
    """Number of copies for each rank or node."""
    slot_N: Tensor
    """The slots of `copies_to_ranks` in the order of experts."""
    reached_TP: Tensor
    """True for the ranks that each token reaches, with nodes."""

    slots: InFlight
    """Slots of the choices that come here, under way."""
    copies_QP: Tensor
    """Copies that each rank of each etp rank's ep group sends."""
    onward: InFlight
    """Ranks of this node that each copy goes on to, under way."""
    second_hop: AllToAll


@dataclass(eq=False)
class DeduplicatedDispatcher(AllToAllDispatcher):
    """Exchanges rows like `AllToAllDispatcher`, but sends a token once to each rank or node.

    Sums are in a fixed order: on the experts' rank by k, on the way back by rank. In narrow types
    each rank's sum is rounded once more than the standard dispatcher would, to be sent.

    Args:
        nodes: None if all of the ep group, or each rank of it alone, are on one node.
    """

    nodes: Nodes | None = None

    def traffic(self, experts_TK: Tensor, route: ExchangeRoute) -> Tensor:
        """Counts rows sent to other ranks, or with nodes to other nodes only: [2] int64, equal."""
        reached_TP = reached_ranks(experts_TK, self.num_local, self.ep_group.size())
        if self.nodes is not None:
            on_nodes_A = self.nodes.by_node(reached_TP).any(2).sum(0)
            sent = on_nodes_A.sum() - on_nodes_A[self.nodes.across.rank()]
        else:
            sent = self.to_others(reached_TP.sum(0))
        return sent.expand(2)

    def route(self, experts_TK: Tensor, rows: Sorted) -> DeduplicatedRoute:
        degree, num_local, nodes = self.ep_group.size(), self.num_local, self.nodes
        sent_PE = rows.counts_E.view(degree, -1)
        *copies, slots_TK, copies_P = copies_to_ranks(experts_TK, num_local, degree)
        table = [sent_PE, copies_P[:, None]]
        if nodes is not None:
            reached_TP = reached_ranks(experts_TK, num_local, degree)
            table.append(nodes.counts_to_send(reached_TP))
            size = nodes.within.size()
            *copies, _, copies_P = copies_to_ranks(experts_TK, num_local * size, degree // size)
        counts = start_numbers(torch.cat(table, 1), AllToAll.of_table(self.ep_group))
        route = DeduplicatedRoute(RowMap(*copies), rows.slots, sent_PE, counts)
        route.copies_P, route.slot_N = copies_P, slots_TK.flatten()[rows.slots.source_R]
        if nodes is not None:
            route.reached_TP = reached_TP
        return route

    def plan(self, route: ExchangeRoute) -> None:
        assert isinstance(route, DeduplicatedRoute)
        num_local, table_PX = self.num_local, route.counts.wait()
        choices_PE, copies_P1, nodes_PX = table_PX.tensor_split([num_local, num_local + 1], 1)
        copies_P, gathered_QPX = copies_P1[:, 0], self.gather_counts(table_PX[:, : num_local + 1])
        counts_QPE, copies_QP = gathered_QPX[..., :-1], gathered_QPX[..., -1]
        if self.ep_group.size() == 1:  # All etp ranks have equally many tokens.
            copies, choices = [len(route.rows.rows_TK)], [len(route.slot_N)]
            slices = len(copies_QP)
            sizes = [copies, copies, choices, choices, copies * slices, choices * slices]
        else:
            by_nodes: list[Tensor] = []
            if self.nodes is not None:
                by_nodes = self.nodes.counts_received(nodes_PX, copies_P)
            # Host sync, once per chunk: collectives of rows take their sizes as Python ints.
            sizes = to_host(
                route.copies_P,
                copies_P,
                route.sent_PE.sum(1),
                choices_PE.sum(1),
                copies_QP.sum(1),
                counts_QPE.sum((1, 2)),
                *by_nodes,
            )
        sent, received, choices_sent, choices_received, *gathered = sizes[:6]
        route.gathered, route.weights_gathered = gathered
        route.num_rows, route.exchange = sum(sent), AllToAll(sent, received, self.ep_group)
        if self.nodes is not None:
            from_nodes, onward, through = sizes[6:]
            route.exchange = AllToAll(sent, from_nodes, self.nodes.across)
            route.onward = self._start_onward(route, self.nodes)
            route.second_hop = AllToAll(onward, through, self.nodes.within)
        route.weights_exchange = AllToAll(choices_sent, choices_received, self.ep_group)
        route.slots = start_numbers(route.slot_N, route.weights_exchange)
        route.counts_PE, route.copies_QP = counts_QPE.flatten(0, 1), copies_QP

    def _start_onward(self, route: DeduplicatedRoute, nodes: Nodes) -> InFlight:
        """Tells the ranks that copies go to first where each goes on to, which their senders
        decide."""
        num_copies = route.num_rows
        node_A = torch.arange(len(route.copies_P), device=route.reached_TP.device)
        node_M = node_A.repeat_interleave(route.copies_P, output_size=num_copies)
        token_M = route.rows.source_R[:num_copies]
        reached_MG = nodes.by_node(route.reached_TP)[token_M, node_M].byte()
        return start_numbers(reached_MG, route.exchange)

    def order(self, route: ExchangeRoute) -> None:
        assert isinstance(route, DeduplicatedRoute)
        if self.nodes is not None:
            most = min(self.top_k, self.nodes.within.size())
            copies = copy_to_ranks(route.onward.wait().bool(), most)
            sources = copies.source_R[: sum(route.second_hop.sent)]
            route.hop = copies._replace(source_R=sources), route.second_hop
        slot_N, gathered = route.slots.wait(), route.weights_gathered
        num_choices, top_k = sum(gathered), self.top_k
        if (slices := len(gathered)) > 1:
            to_all = AllToAll([len(slot_N)] * slices, gathered, self.etp_group)
            slot_N = start_numbers(slot_N.repeat(slices), to_all).wait()
        permuted = permute_indices(route.counts_PE, num_choices, self.row_alignment)
        start_N = self._row_starts(route.copies_QP).repeat_interleave(
            route.counts_PE.sum(1), output_size=num_choices
        )
        slot_N = torch.add(slot_N, start_N, alpha=top_k)
        rows = start_N.new_full((sum(route.gathered) * top_k,), -1)
        rows_MK = rows.scatter_(0, slot_N, permuted.position_R).view(-1, top_k)
        route.ordered = RowMap(follow(slot_N // top_k, permuted.source_R), rows_MK)
        route.weights_ordered, route.offsets_E = row_map(permuted), permuted.offsets_E

    def _row_starts(self, copies_QP: Tensor) -> Tensor:
        """Returns the start of each sending rank's rows among the gathered rows: [Q * P].

        Rows lie in the order in which they were received: rank by rank, or by the rank on this node
        that they came through, and of those by node.
        """
        if self.nodes is None:
            return starts(copies_QP.flatten())
        slices, size = len(copies_QP), self.nodes.within.size()
        rows_QGA = copies_QP.view(slices, -1, size).transpose(1, 2)
        return starts(rows_QGA.flatten()).view_as(rows_QGA).transpose(1, 2).flatten()
