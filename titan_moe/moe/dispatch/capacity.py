"""The dispatcher with bounded buffers: every rank sends every other as many rows, real or not.

The host never learns how many are real, so it never waits. A (token, expert) choice that exceeds
the capacity of its rank's buffer is left out and counted; the first choices of all tokens come
before the second ones, and so on (as in GShard, arXiv 2006.16668, section 2.2, where capacity is by
expert).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_moe.comm.collectives import AllToAll, start_numbers
from titan_moe.moe.dispatch.all_to_all import AllToAllDispatcher, ExchangeRoute
from titan_moe.ops.move_rows import RowMap
from titan_moe.ops.permute_indices import Sorted, invert, reached_ranks, sort_by_expert, starts


@dataclass(eq=False)
class CapacityDispatcher(AllToAllDispatcher):
    """Exchanges rows like `AllToAllDispatcher`, in buffers sized by T, K and the number of ranks.

    Args:
        capacity_factor: rows of the buffer from one rank to another, as a multiple of the T * K /
            ep that a balanced router would send; never more than a token's experts there can be.
    """

    waits_for_host = False
    capacity_factor: float

    def traffic(self, experts_TK: Tensor, route: ExchangeRoute) -> Tensor:
        """Counts rows sent to other ranks, unused buffer rows included, and the fewest needed."""
        ranks, capacity = self.ep_group.size(), self._capacity(len(experts_TK))
        fewest = self.to_others(reached_ranks(experts_TK, self.num_local, ranks).sum(0))
        sent = capacity * (self.etp_group.size() * ranks - 1)
        return torch.stack([torch.full_like(fewest, sent), fewest])

    def route(self, experts_TK: Tensor, rows: Sorted) -> ExchangeRoute:
        capacity, dropped = self._capacity(len(experts_TK)), None
        sent_PE, num_experts = rows.counts_E.view(self.ep_group.size(), -1), len(rows.counts_E)
        rows_P = sent_PE.sum(1)  # By rank; dropped choices are those of one rank more.
        if capacity < len(experts_TK) * min(self.top_k, self.num_local):
            kept_TK = self._first_come(experts_TK // self.num_local, rows_P, capacity)
            experts_TK = experts_TK.masked_fill(~kept_TK, num_experts)
            rows = sort_by_expert(experts_TK, num_experts + 1)
            sent_PE, dropped = rows.counts_E[:-1].view_as(sent_PE), rows.counts_E[-1]
            rows_P = torch.cat([sent_PE.sum(1), rows.counts_E[-1:]])
        counts = start_numbers(sent_PE, AllToAll.of_table(self.ep_group))
        tokens, slots = self._buffers(rows.tokens, rows.slots, rows_P, capacity)
        # Rows that leave are the places of the buffers, free ones among them.
        route = ExchangeRoute(tokens, slots, sent_PE, counts)
        route.dropped = dropped
        return route

    def plan(self, route: ExchangeRoute) -> None:
        received_PE, degree = route.counts.wait(), self.ep_group.size()
        route.num_rows = len(route.rows.source_R)
        capacity = route.num_rows // degree
        # Filling rows count for one more expert, after the last, which nothing reads.
        filling_P1 = capacity - received_PE.sum(1, keepdim=True)
        counts_QPE = self.gather_counts(torch.cat([received_PE, filling_P1], 1))
        buffers = [capacity] * degree
        route.exchange = route.weights_exchange = AllToAll(buffers, buffers, self.ep_group)
        route.gathered = route.weights_gathered = [route.num_rows] * len(counts_QPE)
        route.counts_PE = counts_QPE.flatten(0, 1)

    def _capacity(self, num_tokens: int) -> int:
        """Rows of the buffer for one rank."""
        share = num_tokens * self.top_k / self.ep_group.size()
        most = num_tokens * min(self.top_k, self.num_local)
        return min(math.ceil(self.capacity_factor * share), most)

    def _first_come(self, rank_TK: Tensor, sent_P: Tensor, capacity: int) -> Tensor:
        """Returns True for choices within the capacity, [T, K]; all first choices come first."""
        # A radix sort passes over all bytes of its keys: two hold a rank's number.
        rank_N, slot_N = rank_TK.t().flatten().short().sort(stable=True)
        nth_N = torch.arange(len(rank_N), device=rank_N.device) - starts(sent_P)[rank_N.int()]
        return (nth_N < capacity)[invert(slot_N)].view(rank_TK.shape[::-1]).t()

    def _buffers(
        self, tokens: RowMap, slots: RowMap, rows_P: Tensor, capacity: int
    ) -> tuple[RowMap, RowMap]:
        """Returns the maps from tokens, and from slots, to the buffers of the ranks one after the
        other, -1 in free places and for dropped rows.

        Args:
            rows_P: sorted rows of each rank, which move as one; those past the last are dropped.
        """
        num_rows, size = len(tokens.source_R), self.ep_group.size() * capacity
        first_P = torch.arange(len(rows_P), device=rows_P.device) * capacity
        place_N = torch.arange(num_rows, device=rows_P.device) + (
            first_P - starts(rows_P)
        ).repeat_interleave(rows_P, output_size=num_rows)
        place_N = place_N.clamp_max(size)  # Of dropped rows: past the end, which is cut off.
        empty = place_N.new_full((2, size + 1), -1)
        place_TK = place_N[tokens.rows_TK]
        place_TK = place_TK.masked_fill(place_TK == size, -1)
        return (
            RowMap(empty[0].scatter_(0, place_N, tokens.source_R)[:size], place_TK),
            RowMap(empty[1].scatter_(0, place_N, slots.source_R)[:size], place_TK.view(-1, 1)),
        )
