"""The dispatcher that gives every rank as many rows, whatever the router does: ranks of popular
experts lend some of them to ranks that would wait.

A rank with too few rows borrows all that it lacks from one other rank. Sweeping over the ranks, the
overloaded one whose turn it is lends until it has no more than its share left; what it then lacks
itself it borrows from the next. So Walker's alias method makes a table of even columns (ACM TOMS
3(3), 1977): no rank borrows from two others, or more experts than a rank has. All ranks know all
counts, and make the same plan without another word.

Weights of lent experts travel in every forward, recomputed ones too, and their gradients travel
home in the backward, where they are added up. Optimizer, checkpoints and counts of loads know
nothing of it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titan_moe.comm.collectives import AllToAll, start_numbers, to_host
from titan_moe.moe.dispatch.all_to_all import AllToAllDispatcher, ExchangeRoute
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.moe.dispatch.borrowed import Borrowed
from titan_moe.ops.move_rows import RowMap
from titan_moe.ops.permute_indices import Sorted, invert


class Loans(NamedTuple):
    """The rows that each rank computes, of a list of each rank's rows in the order of experts, and
    of an expert's by source."""

    kept_P: Tensor
    """Rows that it computes of its own list, the first ones."""
    home_P: Tensor
    """The rank of whose list it computes others; any rank if there are none."""
    start_P: Tensor
    """The first of the others in that list."""
    size_P: Tensor
    """The number of the others."""


def plan_loans(load_P: Tensor) -> Loans:
    """Returns who computes what, so that all ranks get as many rows; one more or less if that does
    not divide. Waits for no device.

    Args:
        load_P: int64, rows for each rank's experts.
    """
    ranks, place_P = len(load_P), torch.arange(len(load_P), device=load_P.device)
    total = load_P.sum()
    share_P = total * (place_P + 1) // ranks - total * place_P // ranks
    surplus_P, gap_P = (load_P - share_P).clamp(min=0), (share_P - load_P).clamp(min=0)
    lent_P, asked_P = surplus_P.cumsum(0), gap_P.cumsum(0)
    # The rank whose gap uses up an overloaded one's surplus takes its whole gap there.
    last_P = torch.searchsorted(asked_P, lent_P).clamp(max=ranks - 1)
    size_P = torch.where(surplus_P > 0, asked_P[last_P] - lent_P, gap_P)
    at_P = torch.where(surplus_P > 0, lent_P, asked_P - gap_P)
    home_P = torch.searchsorted(lent_P, at_P, right=True).clamp(max=ranks - 1)
    kept_P = share_P - size_P
    return Loans(kept_P, home_P, kept_P[home_P] + at_P - (lent_P - surplus_P)[home_P], size_P)


class Parts(NamedTuple):
    """Rows of each source for each rank, by the experts of the list that they are from."""

    own_PES: Tensor
    borrowed_PES: Tensor
    """Rows of experts of `Loans.home_P`."""
    skipped_PES: Tensor
    """Rows of the same source and expert that stand before the borrowed ones."""


def cut(counts_PES: Tensor, loans: Loans) -> Parts:
    """Returns the parts of each rank's list that a plan gives to ranks.

    Args:
        counts_PES: int64, rows for each rank's experts by source.
    """
    end_PES = counts_PES.flatten(1).cumsum(1).view_as(counts_PES)
    begin_PES = end_PES - counts_PES
    kept, start, size = (x[:, None, None] for x in (loans.kept_P, loans.start_P, loans.size_P))
    begins_PES, ends_PES = begin_PES[loans.home_P], end_PES[loans.home_P]
    first_PES = begins_PES.clamp(start, start + size)
    return Parts(
        end_PES.minimum(kept) - begin_PES.minimum(kept),
        ends_PES.clamp(start, start + size) - first_PES,
        first_PES - begins_PES,
    )


class BalancedRoute(ExchangeRoute):
    """A route to ranks that may have borrowed experts."""

    borrowed: Borrowed | None = None
    """None if no rank borrows any."""


@dataclass(eq=False)
class BalancedDispatcher(AllToAllDispatcher):
    """Exchanges rows like `AllToAllDispatcher`, between ranks that compute equally many."""

    def route(self, experts_TK: Tensor, rows: Sorted) -> BalancedRoute:
        """Waits for the counts of all ranks: they decide the order in which rows leave."""
        ranks, slices = self.ep_group.size(), self.etp_group.size()
        tokens, slots, counts_E = rows
        table_PE = counts_E.expand(ranks, -1).contiguous()
        counts = start_numbers(table_PE, AllToAll.of_table(self.ep_group))
        # Sources are numbered by slice, and in each by rank.
        counts_SE = self.gather_counts(counts.wait()).flatten(0, 1)
        counts_PES = counts_SE.t().unflatten(0, (ranks, -1)).contiguous()
        loans = plan_loans(counts_PES.sum((1, 2)))
        parts = cut(counts_PES, loans)
        here = self.etp_group.rank() * ranks + self.ep_group.rank()
        order_N = _order(counts_PES, loans, parts, here, experts_TK.numel())
        rows_TK = invert(order_N)[tokens.rows_TK]
        route = BalancedRoute(
            RowMap(tokens.source_R[order_N], rows_TK),
            RowMap(slots.source_R[order_N], rows_TK.view(-1, 1)),
            counts_PES[..., here],
            counts,
        )
        self._plan(route, loans, parts, here, slices)
        return route

    def traffic(self, experts_TK: Tensor, route: ExchangeRoute) -> Tensor:
        """Counts rows on the way to where they are computed."""
        ends_P = route.sent_PE.sum(1).cumsum(0)
        rank_TK = torch.searchsorted(ends_P, route.rows.rows_TK, right=True)
        return super().traffic(rank_TK * self.num_local, route)

    def _plan(
        self, route: BalancedRoute, loans: Loans, parts: Parts, here: int, slices: int
    ) -> None:
        ranks, own, num_local = self.ep_group.size(), self.ep_group.rank(), self.num_local
        rows_PES = torch.stack([parts.own_PES, parts.borrowed_PES], 1).flatten(1, 2)
        rows_QP = rows_PES[own].sum(0).view(slices, ranks)
        lent_PE = parts.borrowed_PES.sum(2) > 0
        # Host sync, once per chunk: collectives take their sizes as Python ints.
        sent, received, gathered, homes, borrows = to_host(
            rows_PES[..., here].sum(1),
            rows_QP[self.etp_group.rank()],
            rows_QP.sum(1),
            loans.home_P,
            lent_PE.sum(1),
        )
        route.num_rows, route.gathered, route.sent_PE = sum(sent), gathered, rows_PES[..., here]
        route.exchange = route.weights_exchange = AllToAll(sent, received, self.ep_group)
        route.weights_gathered, route.num_experts = gathered, num_local + borrows[own]
        own_E = torch.arange(num_local, device=rows_PES.device)
        borrowed_B = lent_PE[own].nonzero_static(size=borrows[own])[:, 0]
        route.counts_PE = rows_PES[own, torch.cat([own_E, num_local + borrowed_B])].t()
        if any(borrows):
            lends = [n * (home == own) for n, home in zip(borrows, homes, strict=True)]
            comes = [borrows[own] * (rank == homes[own]) for rank in range(ranks)]
            exchange = AllToAll(lends, comes, self.ep_group)
            lent_here_PE = lent_PE & (loans.home_P == own)[:, None]
            experts_E = torch.cat([own_E + num_local * own, borrowed_B + num_local * homes[own]])
            route.borrowed = Borrowed(lent_here_PE, exchange, experts_E)

    def plan(self, route: ExchangeRoute) -> None:
        """Does nothing: the route is planned."""

    def receive(self, sent: tuple, route: ExchangeRoute) -> ExpertRows:
        assert isinstance(route, BalancedRoute)
        return super().receive(sent, route)._replace(borrowed=route.borrowed)


def _order(counts_PES: Tensor, loans: Loans, parts: Parts, source: int, num_rows: int) -> Tensor:
    """Returns the place of each row that leaves a source among its rows in the order of experts:
    for each rank the rows of its own experts, then those of borrowed ones."""
    counts_PE = counts_PES[..., source]
    first_PE = counts_PE.flatten().cumsum(0).view_as(counts_PE) - counts_PE
    others_PE = first_PE[loans.home_P] + parts.skipped_PES[..., source]
    starts_N = torch.stack([first_PE, others_PE], 1).flatten()
    lengths_N = torch.stack([parts.own_PES[..., source], parts.borrowed_PES[..., source]], 1)
    lengths_N = lengths_N.flatten()
    shift_N = starts_N - (lengths_N.cumsum(0) - lengths_N)
    row_N = torch.arange(num_rows, device=counts_PE.device)
    return row_N + shift_N.repeat_interleave(lengths_N, output_size=num_rows)
