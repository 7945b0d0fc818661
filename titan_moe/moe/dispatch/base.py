"""The protocol that moves tokens to their experts and back, and the dispatcher of local experts.

`plan` computes, without gradients, where every row goes, and is what recomputation replays instead
of running. `send` and `receive` move rows along a plan to their experts, `combine_start` and
`combine_wait` move them back. All four are differentiable; what is computed between the two of a
pair, and its backward, overlaps with the exchange. Where ranks must exchange counts first, `plan`
starts that exchange, and only the first use of its result waits for it: sorting and gathering go on
meanwhile, and a replay waits for nothing.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from titan_moe.distributed.turns import Turns
from titan_moe.ops.move_rows import RowMap, combine_rows, gather_rows
from titan_moe.ops.permute_indices import follow, permute_indices, sort_by_expert


class ExpertRows(NamedTuple):
    """Rows in expert-major order, ready for grouped GEMMs."""

    x_RD: Tensor
    weights_R: Tensor
    """Routing weight of each row, 0 for padding."""
    offsets_E: Tensor
    """int32: where each local expert's rows end."""


class Dispatcher(Protocol):
    """Moves tokens to experts and back. One between ranks derives from `ExchangeDispatcher`, writes
    `traffic` and `plan`, and is named in `expert_parallel.DISPATCHERS`."""

    waits_for_host: bool = True
    """True if the host must know sizes that routing decides, which no compiled graph can."""
    num_parts: int = 1
    """Parts of the tokens that travel apart, so that one does while the experts compute another;
    set once."""
    turns: Turns | None = None
    """Shared by a forward and a backward that run beside each other, so that one computes while the
    other's rows travel; set once."""

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        """Rows that this rank's tokens send to other ranks, one way, and the fewest that would do:
        the distinct (token, destination rank) pairs. [2] int64, without a wait for the device."""

    def plan(self, experts_TK: Tensor, counts_E: Tensor) -> Any:
        """Compute where each of the T*K rows goes, and start the exchange of counts.
        `counts_E`: rows of each expert."""

    def send(self, x_TD: Tensor, weights_TK: Tensor, plan: Any) -> Any:
        """Start the exchange of this rank's rows: what `receive` takes. The first use of a plan may
        wait for the device, once."""

    def receive(self, sent: Any, plan: Any) -> ExpertRows:
        """The rows of this rank's experts, once they are here."""

    def combine_start(self, y_RD: Tensor, plan: Any) -> Any:
        """Start to send the experts' outputs back: what `combine_wait` takes."""

    def combine_wait(self, home: Any, plan: Any) -> Tensor:
        """The sum of each token's K rows, once they are here: y_TD."""

    def combine(self, y_RD: Tensor, plan: Any) -> Tensor:
        """Send the experts' outputs back and add up each token's K rows: y_TD."""
        return self.combine_wait(self.combine_start(y_RD, plan), plan)

    def dropped(self, plan: Any) -> Tensor | None:
        """Returns the number of the T*K rows that exceeded the capacity, [] int64, without a wait
        for the device; None if the dispatcher drops none."""
        return None


class LocalPlan(NamedTuple):
    """Holds the row maps to and from experts that are all on this rank."""

    tokens: RowMap
    slots: RowMap
    offsets_E: Tensor


class LocalDispatcher(Dispatcher):
    """All experts are here: one gather into padded expert-major order, one back. Never waits."""

    waits_for_host = False

    def __init__(self, row_alignment: int) -> None:
        self.row_alignment = row_alignment

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        return counts_E.new_zeros(2)

    def plan(self, experts_TK: Tensor, counts_E: Tensor) -> LocalPlan:
        tokens, slots = sort_by_expert(experts_TK, len(counts_E))
        permuted = permute_indices(counts_E[None], experts_TK.numel(), self.row_alignment)
        rows_TK = permuted.position_R[tokens.rows_TK]
        return LocalPlan(
            tokens=RowMap(follow(tokens.source_R, permuted.source_R), rows_TK),
            slots=RowMap(follow(slots.source_R, permuted.source_R), rows_TK.view(-1, 1)),
            offsets_E=permuted.offsets_E,
        )

    def send(self, x_TD: Tensor, weights_TK: Tensor, plan: LocalPlan) -> ExpertRows:
        return ExpertRows(
            x_RD=gather_rows(x_TD, plan.tokens),
            weights_R=gather_rows(weights_TK.reshape(-1, 1), plan.slots).flatten(),
            offsets_E=plan.offsets_E,
        )

    def receive(self, sent: ExpertRows, plan: LocalPlan) -> ExpertRows:
        return sent

    def combine_start(self, y_RD: Tensor, plan: LocalPlan) -> Tensor:
        return combine_rows(y_RD, plan.tokens)

    def combine_wait(self, home: Tensor, plan: LocalPlan) -> Tensor:
        return home
