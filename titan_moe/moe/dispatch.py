"""How tokens reach their experts: the protocol, and the dispatcher for experts that are all here.

A dispatcher works in three moves. `plan` decides, without gradients, where every row goes; it is
the only move that may wait for the device, and what recomputation replays instead of running.
`dispatch` and `combine` move rows along a plan and are differentiable.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from titan_moe.kernels.permute_indices import PermuteIndices, max_padded_rows, permute_indices
from titan_moe.moe.permute import combine_rows, gather_rows, invert


class ExpertRows(NamedTuple):
    """Rows in expert-major order, ready for grouped GEMMs."""

    x_RD: Tensor
    weights_R: Tensor
    """Routing weight of each row, 0 for padding."""
    offsets_E: Tensor
    """int32: where each local expert's rows end."""


class SortedTokens(NamedTuple):
    """T*K rows ordered by expert; within an expert, by token."""

    token_N: Tensor
    """The token of each sorted row."""
    slot_N: Tensor
    """The flat (token, k) slot of each sorted row."""
    rows_TK: Tensor
    """The sorted row of each slot."""
    counts_E: Tensor
    """Rows per expert."""


def sort_by_expert(experts_TK: Tensor, num_experts: int) -> SortedTokens:
    """Order the T*K rows by expert, stably."""
    expert_N, slot_N = experts_TK.flatten().sort(stable=True)
    borders = torch.arange(num_experts + 1, device=expert_N.device)
    return SortedTokens(
        token_N=slot_N // experts_TK.shape[1],
        slot_N=slot_N,
        rows_TK=invert(slot_N).view_as(experts_TK),
        counts_E=torch.searchsorted(expert_N, borders).diff(),
    )


class Dispatcher(Protocol):
    """Moves tokens to experts and back. To add one, write these four in a file of its own."""

    def traffic(self, tokens: SortedTokens) -> Tensor:
        """Rows that this rank's tokens put on the wire one way, and the fewest that would do: the
        distinct (token, destination rank) pairs. [2] int64, without a wait for the device."""

    def plan(self, tokens: SortedTokens) -> Any:
        """Decide where each of the T*K rows goes."""

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: Any) -> ExpertRows:
        """Bring this rank's experts their rows."""

    def combine(self, y_RD: Tensor, plan: Any) -> Tensor:
        """Bring the experts' outputs home and add up each token's K rows: y_TD."""


class LocalPlan(NamedTuple):
    """Where rows go when every expert is on this rank."""

    token_R: Tensor
    slot_R: Tensor
    rows_TK: Tensor
    offsets_E: Tensor


class LocalDispatcher:
    """All experts are here: one gather into padded expert-major order, one back. Never waits."""

    def __init__(self, row_alignment: int) -> None:
        self.row_alignment = row_alignment

    def traffic(self, tokens: SortedTokens) -> Tensor:
        return tokens.counts_E.new_zeros(2)

    def plan(self, tokens: SortedTokens) -> LocalPlan:
        num_rows = tokens.slot_N.numel()
        permuted = pad_to_alignment(tokens.counts_E[None], num_rows, self.row_alignment)
        return LocalPlan(
            token_R=follow(tokens.token_N, permuted.source_R),
            slot_R=follow(tokens.slot_N, permuted.source_R),
            rows_TK=permuted.position_R[tokens.rows_TK],
            offsets_E=permuted.offsets_E,
        )

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: LocalPlan) -> ExpertRows:
        weights_N1 = weights_TK.reshape(-1, 1)
        return ExpertRows(
            x_RD=gather_rows(x_TD, plan.token_R, plan.rows_TK),
            weights_R=gather_rows(weights_N1, plan.slot_R, plan.rows_TK.view(-1, 1))[:, 0],
            offsets_E=plan.offsets_E,
        )

    def combine(self, y_RD: Tensor, plan: LocalPlan) -> Tensor:
        return combine_rows(y_RD, plan.rows_TK, plan.token_R)


def pad_to_alignment(counts_PE: Tensor, num_rows: int, row_alignment: int) -> PermuteIndices:
    """Padded expert-major order of `num_rows` rows that arrived in P rank-major parts."""
    max_rows = max_padded_rows(num_rows, counts_PE.shape[1], row_alignment)
    return permute_indices(
        counts_PE, num_rows=num_rows, row_alignment=row_alignment, max_rows=max_rows
    )


def follow(target_N: Tensor, source_R: Tensor) -> Tensor:
    """target_N[source_R], with padding's -1 kept."""
    if source_R.numel() == target_N.numel():
        return target_N[source_R]
    return torch.where(source_R < 0, -1, target_N[source_R.clamp_min(0)])
