"""The calls that move tokens to their experts and back, for experts that are all on this rank.

`MoE.forward` makes them in this order, for each chunk of the tokens around one `Route`:

    route -> send -> order -> receive -> (experts) -> send_home -> add_up

`route` decides, without gradients, where rows go. The exchanges that follow from it, which `send`
plans once the counts of other ranks are here, and the order of the rows that come are kept in the
route. A recomputation is given the complete route of its forward, and neither exchanges counts nor
waits for sizes again. The other calls move rows and are differentiable. What is computed between
`send` and `receive`, and between `send_home` and `add_up`, overlaps with the exchange of rows, and
so does its backward.
"""

from typing import Any, NamedTuple

from torch import Tensor

from titan_moe.comm.turns import Turns
from titan_moe.moe.dispatch.borrowed import Borrowed
from titan_moe.ops.move_rows import RowMap, combine_rows, gather_rows, gather_rows_twice
from titan_moe.ops.permute_indices import Sorted, follow, permute_indices


class ExpertRows(NamedTuple):
    """Rows in expert-major order, ready for grouped GEMMs."""

    x_RD: Tensor
    weights_R: Tensor
    """Routing weight of each row, 0 for padding."""
    offsets_E: Tensor
    """int32: where each local expert's rows end."""
    borrowed: Borrowed | None = None
    """Brings the weights of the last experts, which are not this rank's; None: all are."""
    again_RD: Tensor | None = None
    """x_RD for a second reader: a sum of both gradients needs no pass of its own then."""


class Route:
    """The way of some tokens to their experts and back. No tuple: FSDP would look for tensors in
    it."""

    offsets_E: Tensor
    """int32: where each local expert's rows end, once the rows are ordered."""
    dropped: Tensor | None = None
    """Number of the T*K rows that exceed the capacity, [] int64, once it is known; None if none
    can."""
    complete: bool = False
    """True if the rows that come are ordered: in a recomputation."""

    def __init__(self, rows: RowMap, weights: RowMap) -> None:
        self.rows = rows
        """Maps tokens to the rows that leave; `source_R` may be longer than the number of rows."""
        self.weights = weights
        """Maps (token, k) slots to the routing weights that leave."""


class Dispatcher:
    """Moves tokens to experts that are all on this rank, and back: one gather into padded
    expert-major order, one back. Never waits.

    A dispatcher between ranks derives from `AllToAllDispatcher`, writes `route` and `plan`, and
    `traffic` where not every choice is a row, and is named in `expert_parallel.DISPATCHERS`.
    """

    waits_for_host = False
    """True if the host must know sizes that routing decides, which no compiled graph can."""
    turns: Turns | None = None
    """Shared by a forward and a backward that run beside each other, so that one computes while the
    other's rows travel; set once."""

    def __init__(self, row_alignment: int) -> None:
        self.row_alignment = row_alignment

    def traffic(self, experts_TK: Tensor, route: Any) -> Tensor:
        """Returns the rows that this rank's tokens send to other ranks, one way, and the fewest
        that would do, the distinct (token, destination rank) pairs: [2] int64, without a wait for
        the device."""
        return experts_TK.new_zeros(2)

    def route(self, experts_TK: Tensor, rows: Sorted) -> Any:
        """Returns the `Route` of tokens to their experts, and starts the exchange of counts."""
        tokens, slots, counts_E = rows
        permuted = permute_indices(counts_E[None], experts_TK.numel(), self.row_alignment)
        rows_TK = permuted.position_R[tokens.rows_TK]
        route = Route(
            RowMap(follow(tokens.source_R, permuted.source_R), rows_TK),
            RowMap(follow(slots.source_R, permuted.source_R), rows_TK.view(-1, 1)),
        )
        route.offsets_E = permuted.offsets_E
        return route

    def send(self, x_TD: Tensor, weights_TK: Tensor, route: Any) -> Any:
        """Gathers the rows that leave, while counts travel, and starts their exchange: returns what
        `receive` takes. In a forward it waits for the counts, the only wait of the host."""
        x_RD, again_RD = gather_rows_twice(x_TD, route.rows)
        weights_R = gather_rows(weights_TK.reshape(-1, 1), route.weights).flatten()
        return ExpertRows(x_RD, weights_R, route.offsets_E, again_RD=again_RD)

    def order(self, route: Any) -> None:
        """Orders the rows that come by expert, while they travel. Not called again in a
        recomputation."""

    def receive(self, sent: Any, route: Any) -> ExpertRows:
        """Returns the rows of this rank's experts, once they are here."""
        return sent

    def send_home(self, y_RD: Tensor, route: Any) -> Any:
        """Starts to send the experts' outputs back: returns what `add_up` takes."""
        return combine_rows(y_RD, route.rows)

    def add_up(self, home: Any, route: Any) -> Tensor:
        """Returns the sum of each token's K rows, once they are here: y_TD."""
        return home
