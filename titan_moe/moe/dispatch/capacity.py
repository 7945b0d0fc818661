"""The dispatcher with bounded buffers: every rank sends every other as many rows, real or not.

The host never learns how many there are, so it never waits. A (token, expert) choice that finds no
room in its rank's buffer is left out and counted; the first choices of all tokens come before the
second ones, and so on (as in GShard, arXiv 2006.16668, section 2.2, where capacity is by expert).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
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
from titan_moe.distributed.numbers import tell_table
from titan_moe.moe.dispatch.all_to_all import reached
from titan_moe.moe.dispatch.base import (
    Dispatcher,
    ExpertRows,
    Later,
    pad_to_alignment,
    sort_by_expert,
)
from titan_moe.moe.permute import combine_rows, gather_rows, invert
from titan_moe.moe.ragged import add_present, copy_present, starts


class Arrival(NamedTuple):
    """Where the rows of all buffers go here; what is no row comes after the last expert's."""

    source_R: Tensor
    position_N1: Tensor
    offsets_E: Tensor


class BoundedPlan(NamedTuple):
    """Which rows fill the buffers."""

    capacity: int
    """Rows of the buffer for one rank."""
    token_B: Tensor
    """The token in each place of the buffers, -1 where there is none."""
    slot_B: Tensor
    """Its flat (token, k) slot."""
    place_TK: Tensor
    """The place of each slot, -1 where there was no room."""
    dropped: Tensor | None
    arrival: Later[Arrival]


class RowsUnderWay(NamedTuple):
    """Buffers on their way over ep."""

    x_BD: Travelling
    weights_B1: Travelling


class BoundedDispatcher(Dispatcher):
    """As `AllToAllDispatcher`, in buffers of a size that T, K and the number of ranks fix.

    Args:
        top_k: experts of a token, all different.
        capacity_factor: rows of the buffer from one rank to another, as a multiple of the T * K /
            ep that a balanced router would send; never more than a token's experts there can be.
    """

    def __init__(
        self,
        ep_group: ProcessGroup,
        etp_group: ProcessGroup,
        *,
        num_local: int,
        row_alignment: int,
        top_k: int,
        capacity_factor: float,
    ) -> None:
        self.ep_group, self.etp_group = ep_group, etp_group
        self.num_local, self.row_alignment = num_local, row_alignment
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self.turns: Turns = NoTurns()

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        """As the protocol says; what fills the buffers travels too."""
        degree, slices = self.ep_group.size(), self.etp_group.size()
        buffer = self._capacity(len(experts_TK))
        rows_P = reached(experts_TK // self.num_local, degree).sum(0)
        fewest = slices * rows_P.sum() - rows_P[self.ep_group.rank()]
        return torch.stack([torch.full_like(fewest, buffer * (slices * degree - 1)), fewest])

    def plan(self, experts_TK: Tensor, counts_E: Tensor) -> BoundedPlan:
        degree, num_rows = self.ep_group.size(), experts_TK.numel()
        capacity = self._capacity(len(experts_TK))
        has_room = capacity == len(experts_TK) * min(self.top_k, self.num_local)
        tokens = sort_by_expert(experts_TK)
        sent_P = counts_E.view(degree, -1).sum(1)
        kept_PE, kept_N, dropped = counts_E.view(degree, -1), None, None
        if not has_room:
            kept_TK = self._first_come(experts_TK // self.num_local, sent_P, capacity)
            kept_N = kept_TK.flatten()[tokens.slot_N]
            ends_E = F.pad(kept_N.cumsum(0), (1, 0))[F.pad(counts_E.cumsum(0), (1, 0))]
            kept_PE = ends_E.diff().view(degree, -1)
            dropped = num_rows - ends_E[-1]
        heard = tell_table(kept_PE, self.ep_group)

        # Sorted rows move as whole segments, one for each rank; the dropped ones past the end.
        rank_N = torch.arange(degree, device=sent_P.device).repeat_interleave(
            sent_P, output_size=num_rows
        )
        nth_N = torch.arange(num_rows, device=sent_P.device)
        if kept_N is not None:
            nth_N = kept_N.cumsum(0) - 1
        place_N = rank_N * capacity + nth_N - starts(kept_PE.sum(1))[rank_N]
        if kept_N is not None:
            place_N = place_N.where(kept_N, degree * capacity)
        empty = place_N.new_full((2, degree * capacity + 1), -1)
        place_TK = place_N[tokens.rows_TK]
        return BoundedPlan(
            capacity=capacity,
            token_B=empty[0].scatter_(0, place_N, tokens.token_N)[:-1],
            slot_B=empty[1].scatter_(0, place_N, tokens.slot_N)[:-1],
            place_TK=place_TK.masked_fill(place_TK == degree * capacity, -1),
            dropped=dropped,
            arrival=Later(lambda: self._arrive(heard.heard(), capacity)),
        )

    def dropped(self, plan: BoundedPlan) -> Tensor | None:
        return plan.dropped

    def _capacity(self, num_tokens: int) -> int:
        """Rows of the buffer for one rank."""
        share = num_tokens * self.top_k / self.ep_group.size()
        most = num_tokens * min(self.top_k, self.num_local)
        return min(math.ceil(self.capacity_factor * share), most)

    def _first_come(self, rank_TK: Tensor, sent_P: Tensor, capacity: int) -> Tensor:
        """Which choices find room, [T, K]: first all tokens' first ones."""
        rank_N, slot_N = rank_TK.t().flatten().sort(stable=True)
        nth_N = torch.arange(len(rank_N), device=rank_N.device) - starts(sent_P)[rank_N]
        return (nth_N < capacity)[invert(slot_N)].view(rank_TK.shape[::-1]).t()

    def _arrive(self, heard_PE: Tensor, capacity: int) -> Arrival:
        # What fills a rank's buffer up is a last expert's, behind which nobody looks.
        filling_P1 = capacity - heard_PE.sum(1, keepdim=True)
        counts_PE = torch.cat([heard_PE, filling_P1], 1)
        if (slices := self.etp_group.size()) > 1:
            counts_PE = gather_parts(counts_PE, self.etp_group).flatten(0, 1)
        num_rows = slices * self.ep_group.size() * capacity
        permuted = pad_to_alignment(counts_PE, num_rows, self.row_alignment)
        return Arrival(
            source_R=permuted.source_R,
            position_N1=permuted.position_R[:, None],
            offsets_E=permuted.offsets_E[:-1],
        )

    def send(self, x_TD: Tensor, weights_TK: Tensor, plan: BoundedPlan) -> RowsUnderWay:
        x_BD = copy_present(x_TD, plan.token_B, plan.place_TK)
        weights_B1 = copy_present(weights_TK.reshape(-1, 1), plan.slot_B, plan.place_TK.view(-1, 1))
        out = self._exchange(plan)
        without_turns = out._replace(turns=NoTurns())
        return RowsUnderWay(start_rows(x_BD, out), start_rows(weights_B1, without_turns))

    def receive(self, sent: RowsUnderWay, plan: BoundedPlan) -> ExpertRows:
        out = self._exchange(plan)
        x_BD = wait_rows(sent.x_BD, out)
        weights_B1 = wait_rows(sent.weights_B1, out._replace(turns=NoTurns()))
        return ExpertRows(
            x_RD=self._to_experts(x_BD, plan),
            weights_R=self._to_experts(weights_B1, plan)[:, 0],
            offsets_E=plan.arrival().offsets_E,
        )

    def combine(self, y_RD: Tensor, plan: BoundedPlan) -> Tensor:
        arrival = plan.arrival()
        y_BD = combine_rows(y_RD, arrival.position_N1, arrival.source_R)
        if self.etp_group.size() > 1:
            y_BD = reduce_scatter_rows(y_BD, self._gathered(plan), self.etp_group)
        home = self._exchange(plan)
        y_BD = wait_rows(start_rows(y_BD, home), home)
        return add_present(y_BD, plan.place_TK, plan.token_B)

    def _exchange(self, plan: BoundedPlan) -> Exchange:
        equal = [plan.capacity] * self.ep_group.size()
        return Exchange(equal, equal, self.ep_group, self.turns)

    def _gathered(self, plan: BoundedPlan) -> list[int]:
        return [plan.capacity * self.ep_group.size()] * self.etp_group.size()

    def _to_experts(self, x_BD: Tensor, plan: BoundedPlan) -> Tensor:
        arrival = plan.arrival()
        if self.etp_group.size() > 1:
            x_BD = all_gather_rows(x_BD, self._gathered(plan), self.etp_group)
        return gather_rows(x_BD, arrival.source_R, arrival.position_N1)
