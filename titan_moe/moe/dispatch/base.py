"""How tokens reach their experts: the protocol, and the dispatcher for experts that are all here.

A dispatcher works in four moves. `plan` decides, without gradients, where every row goes, and is
what recomputation replays instead of running. `send`, `receive` and `combine` move rows along a
plan and are differentiable; what is computed between the first two, and its backward, runs while
rows travel. Where ranks must first tell each other how many rows will come, `plan` starts that
exchange, and only the first use of its result waits for it: sorting and gathering go on meanwhile,
and a replay waits for nothing.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from titan_moe.moe.permute import combine_rows, gather_rows, invert
from titan_moe.ops.permute_indices import PermuteIndices, max_padded_rows, permute_indices


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


def count_experts(experts_TK: Tensor, num_experts: int) -> Tensor:
    """How many of the T*K rows each expert gets: counts_E, int64, without a wait for the device.

    Apart from the sort, which takes longer: the counts can travel meanwhile. Integers add up to the
    same sum in any order, so that atomics do no harm here.
    """
    slot_N = experts_TK.flatten()
    return slot_N.new_zeros(num_experts).scatter_add_(0, slot_N, torch.ones_like(slot_N))


def sort_by_expert(experts_TK: Tensor) -> SortedTokens:
    """Order the T*K rows by expert, stably."""
    slot_N = experts_TK.flatten().sort(stable=True).indices
    return SortedTokens(
        token_N=slot_N // experts_TK.shape[1],
        slot_N=slot_N,
        rows_TK=invert(slot_N).view_as(experts_TK),
    )


class Dispatcher(Protocol):
    """Moves tokens to experts and back. To add one, derive from this and write all but the last in
    a file of its own."""

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        """Rows that this rank's tokens put on the wire one way, and the fewest that would do: the
        distinct (token, destination rank) pairs. [2] int64, without a wait for the device."""

    def plan(self, experts_TK: Tensor, counts_E: Tensor) -> Any:
        """Decide where each of the T*K rows goes, and start what ranks must tell each other first.
        `counts_E`: rows of each expert."""

    def send(self, x_TD: Tensor, weights_TK: Tensor, plan: Any) -> Any:
        """Start this rank's rows on their way: what `receive` wants. The first use of a plan may
        wait for the device, once."""

    def receive(self, sent: Any, plan: Any) -> ExpertRows:
        """This rank's experts' rows, arrived."""

    def combine(self, y_RD: Tensor, plan: Any) -> Tensor:
        """Bring the experts' outputs home and add up each token's K rows: y_TD."""

    def dropped(self, plan: Any) -> Tensor | None:
        """How many of the T*K rows found no room, [] int64, without a wait for the device; None of
        a dispatcher that always has room."""
        return None


T = TypeVar("T")


class Later(Generic[T]):
    """A value that is made when it is first asked for, and kept; what it was made of is let go.

    What the forward pass asked a plan for, a recomputation finds there.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make

    def __call__(self) -> T:
        if self._make is not None:
            self._value = self._make()
            self._make = None
        return self._value


class LocalPlan(NamedTuple):
    """Where rows go when every expert is on this rank."""

    token_R: Tensor
    slot_R: Tensor
    rows_TK: Tensor
    offsets_E: Tensor


class LocalDispatcher(Dispatcher):
    """All experts are here: one gather into padded expert-major order, one back. Never waits."""

    def __init__(self, row_alignment: int) -> None:
        self.row_alignment = row_alignment

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        return counts_E.new_zeros(2)

    def plan(self, experts_TK: Tensor, counts_E: Tensor) -> LocalPlan:
        tokens = sort_by_expert(experts_TK)
        permuted = pad_to_alignment(counts_E[None], experts_TK.numel(), self.row_alignment)
        return LocalPlan(
            token_R=follow(tokens.token_N, permuted.source_R),
            slot_R=follow(tokens.slot_N, permuted.source_R),
            rows_TK=permuted.position_R[tokens.rows_TK],
            offsets_E=permuted.offsets_E,
        )

    def send(self, x_TD: Tensor, weights_TK: Tensor, plan: LocalPlan) -> ExpertRows:
        weights_N1 = weights_TK.reshape(-1, 1)
        return ExpertRows(
            x_RD=gather_rows(x_TD, plan.token_R, plan.rows_TK),
            weights_R=gather_rows(weights_N1, plan.slot_R, plan.rows_TK.view(-1, 1))[:, 0],
            offsets_E=plan.offsets_E,
        )

    def receive(self, sent: ExpertRows, plan: LocalPlan) -> ExpertRows:
        return sent

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
