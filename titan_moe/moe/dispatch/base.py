"""The protocol that moves tokens to their experts and back, and the dispatcher of local experts.

A dispatch is a row of plain calls, which `MoE.forward` and `Experts.forward` make in this order:

    start_counts -> gather -> sizes -> send -> order -> receive -> (experts) -> send_home -> add_up

`start_counts`, `sizes` and `order` decide, without gradients, where rows go. Each returns a record
with named fields, which recomputation replays instead of deciding anew; an exchange of numbers that
a record holds under way is waited for by the next of the three, in the forward alone. The others
move rows along these decisions and are differentiable. What is computed between `send` and
`receive`, and between `send_home` and `add_up`, overlaps with the exchange of rows, and so does its
backward.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from titan_moe.comm.turns import Turns
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
    `start_counts`, `sizes` and `traffic`, and is named in `expert_parallel.DISPATCHERS`."""

    waits_for_host: bool = True
    """True if the host must know sizes that routing decides, which no compiled graph can."""
    num_chunks: int = 1
    """Parts of the tokens that travel apart, so that one does while the experts compute another;
    set once."""
    turns: Turns | None = None
    """Shared by a forward and a backward that run beside each other, so that one computes while the
    other's rows travel; set once."""

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        """Rows that this rank's tokens send to other ranks, one way, and the fewest that would do:
        the distinct (token, destination rank) pairs. [2] int64, without a wait for the device."""

    def start_counts(self, experts_TK: Tensor, counts_E: Tensor) -> Any:
        """Returns the draft of a dispatch: the rows that leave, and the exchange of counts under
        way. `counts_E`: rows of each expert."""

    def gather(self, x_TD: Tensor, weights_TK: Tensor, draft: Any) -> Any:
        """Gathers the rows that leave, while counts travel: what `send` takes."""

    def sizes(self, draft: Any) -> Any:
        """Returns the plan of the exchanges, once the counts are here: the only wait of the host,
        for sizes that are numbers of Python. A plan's `dropped` is the number of the T*K rows that
        exceed the capacity, [] int64; None if none can."""

    def send(self, gathered: Any, plan: Any) -> Any:
        """Starts the exchange of rows: what `receive` takes."""

    def order(self, plan: Any) -> Any:
        """Returns the order of the received rows, made while they travel."""

    def receive(self, sent: Any, plan: Any, order: Any) -> ExpertRows:
        """Returns the rows of this rank's experts, once they are here."""

    def send_home(self, y_RD: Tensor, plan: Any, order: Any) -> Any:
        """Starts to send the experts' outputs back: what `add_up` takes."""

    def add_up(self, home: Any, draft: Any) -> Tensor:
        """Returns the sum of each token's K rows, once they are here: y_TD."""


class LocalDraft(NamedTuple):
    """Holds the row maps to and from experts that are all on this rank: all there is to know."""

    tokens: RowMap
    slots: RowMap
    offsets_E: Tensor
    dropped: None = None


class LocalDispatcher(Dispatcher):
    """All experts are here: one gather into padded expert-major order, one back. Never waits."""

    waits_for_host = False

    def __init__(self, row_alignment: int) -> None:
        self.row_alignment = row_alignment

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        return counts_E.new_zeros(2)

    def start_counts(self, experts_TK: Tensor, counts_E: Tensor) -> LocalDraft:
        tokens, slots = sort_by_expert(experts_TK, len(counts_E))
        permuted = permute_indices(counts_E[None], experts_TK.numel(), self.row_alignment)
        rows_TK = permuted.position_R[tokens.rows_TK]
        return LocalDraft(
            tokens=RowMap(follow(tokens.source_R, permuted.source_R), rows_TK),
            slots=RowMap(follow(slots.source_R, permuted.source_R), rows_TK.view(-1, 1)),
            offsets_E=permuted.offsets_E,
        )

    def gather(self, x_TD: Tensor, weights_TK: Tensor, draft: LocalDraft) -> ExpertRows:
        return ExpertRows(
            x_RD=gather_rows(x_TD, draft.tokens),
            weights_R=gather_rows(weights_TK.reshape(-1, 1), draft.slots).flatten(),
            offsets_E=draft.offsets_E,
        )

    def sizes(self, draft: LocalDraft) -> LocalDraft:
        return draft

    def send(self, gathered: ExpertRows, plan: LocalDraft) -> ExpertRows:
        return gathered

    def order(self, plan: LocalDraft) -> None:
        return None

    def receive(self, sent: ExpertRows, plan: LocalDraft, order: None) -> ExpertRows:
        return sent

    def send_home(self, y_RD: Tensor, plan: LocalDraft, order: None) -> Tensor:
        return combine_rows(y_RD, plan.tokens)

    def add_up(self, home: Tensor, draft: LocalDraft) -> Tensor:
        return home
