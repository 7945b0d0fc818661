"""The dispatcher with bounded buffers: every rank sends every other as many rows, real or not.

The host never learns how many are real, so it never waits. A (token, expert) choice that exceeds
the capacity of its rank's buffer is left out and counted; the first choices of all tokens come
before the second ones, and so on (as in GShard, arXiv 2006.16668, section 2.2, where capacity is by
expert).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.distributed.collectives import AllToAll, Pending, exchange_counts
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.exchange import ExchangeDispatcher, ExchangePlan, Exchanges
from titan_moe.ops.move_rows import RowMap
from titan_moe.ops.permute_indices import SortedRows, invert, reached_ranks, sort_by_expert, starts


class CapacityDispatcher(ExchangeDispatcher):
    """Exchanges rows like `AllToAllDispatcher`, in buffers sized by T, K and the number of ranks.

    Args:
        capacity_factor: rows of the buffer from one rank to another, as a multiple of the T * K /
            ep that a balanced router would send; never more than a token's experts there can be.
    """

    waits_for_host = False

    def __init__(
        self,
        ep_group: ProcessGroup,
        etp_group: ProcessGroup,
        config: MoEConfig,
        capacity_factor: float,
    ) -> None:
        super().__init__(ep_group, etp_group, config)
        self.capacity_factor = capacity_factor

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        """Counts rows sent to other ranks, unused buffer rows included, and the fewest needed."""
        degree, slices = self.ep_group.size(), self.etp_group.size()
        buffer = self._capacity(len(experts_TK))
        rows_P = reached_ranks(experts_TK, self.num_local, degree).sum(0)
        fewest = slices * rows_P.sum() - rows_P[self.ep_group.rank()]
        return torch.stack([torch.full_like(fewest, buffer * (slices * degree - 1)), fewest])

    def plan(self, experts_TK: Tensor, counts_E: Tensor) -> ExchangePlan:
        capacity = self._capacity(len(experts_TK))
        counts_PE, dropped = counts_E.view(self.ep_group.size(), -1), None
        sorted_rows = sort_by_expert(experts_TK, len(counts_E))
        kept_PE, kept_N = counts_PE, None
        if capacity < len(experts_TK) * min(self.top_k, self.num_local):
            kept_TK = self._first_come(experts_TK // self.num_local, counts_PE.sum(1), capacity)
            kept_N = kept_TK.flatten()[sorted_rows.slots.source_R]
            ends_E = F.pad(kept_N.cumsum(0), (1, 0))[F.pad(counts_E.cumsum(0), (1, 0))]
            kept_PE = ends_E.diff().view_as(counts_PE)
            dropped = experts_TK.numel() - ends_E[-1]
        received = exchange_counts(kept_PE, self.ep_group)
        buffers = self._buffers(sorted_rows, counts_PE.sum(1), kept_PE.sum(1), kept_N, capacity)
        return ExchangePlan(
            rows=buffers.tokens,
            weights=buffers.slots,
            exchanges=Pending(lambda: self._exchanges(received.wait(), capacity)),
            dropped=dropped,
        )

    def _capacity(self, num_tokens: int) -> int:
        """Rows of the buffer for one rank."""
        share = num_tokens * self.top_k / self.ep_group.size()
        most = num_tokens * min(self.top_k, self.num_local)
        return min(math.ceil(self.capacity_factor * share), most)

    def _first_come(self, rank_TK: Tensor, sent_P: Tensor, capacity: int) -> Tensor:
        """Returns which choices are within the capacity, [T, K]; all first choices come first."""
        # A radix sort passes over all bytes of its keys: two hold a rank's number.
        rank_N, slot_N = rank_TK.t().flatten().short().sort(stable=True)
        nth_N = torch.arange(len(rank_N), device=rank_N.device) - starts(sent_P)[rank_N.int()]
        return (nth_N < capacity)[invert(slot_N)].view(rank_TK.shape[::-1]).t()

    def _buffers(
        self,
        sorted_rows: SortedRows,
        counts_P: Tensor,
        kept_P: Tensor,
        kept_N: Tensor | None,
        capacity: int,
    ) -> SortedRows:
        """Returns the maps from tokens, and from slots, to the P buffers one after the other, -1
        in free places and for dropped rows. Sorted rows move as segments, one for each rank."""
        (token_N, rows_TK), (slot_N, _) = sorted_rows
        num_rows, size = len(token_N), len(counts_P) * capacity
        rank_N = torch.arange(len(counts_P), device=counts_P.device).repeat_interleave(
            counts_P, output_size=num_rows
        )
        nth_N = torch.arange(num_rows, device=counts_P.device)
        if kept_N is not None:
            nth_N = kept_N.cumsum(0) - 1
        place_N = rank_N * capacity + nth_N - starts(kept_P)[rank_N]
        if kept_N is not None:
            place_N = place_N.where(kept_N, size)  # One place past the end.
        empty = place_N.new_full((2, size + 1), -1)
        place_TK = place_N[rows_TK]
        place_TK = place_TK.masked_fill(place_TK == size, -1)
        return SortedRows(
            tokens=RowMap(empty[0].scatter_(0, place_N, token_N)[:-1], place_TK),
            slots=RowMap(empty[1].scatter_(0, place_N, slot_N)[:-1], place_TK.view(-1, 1)),
        )

    def _exchanges(self, received_PE: Tensor, capacity: int) -> Exchanges:
        # Filling rows count for one more expert, after the last, which nothing reads.
        filling_P1 = capacity - received_PE.sum(1, keepdim=True)
        counts_QPE = self.gather_counts(torch.cat([received_PE, filling_P1], 1))
        slices, degree, _ = counts_QPE.shape
        gathered, equal = [degree * capacity] * slices, [capacity] * degree
        order = self.expert_order(counts_QPE.flatten(0, 1), sum(gathered), self.num_local)
        return Exchanges(
            rows=AllToAll(equal, equal, self.ep_group),
            weights=AllToAll(equal, equal, self.ep_group),
            rows_gathered=gathered,
            weights_gathered=gathered,
            expert_order=Pending(lambda: order),
        )
