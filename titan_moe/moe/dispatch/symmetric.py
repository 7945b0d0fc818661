"""The dispatcher whose sizes stay on the device: nothing is padded or dropped, and the host never
waits.

All ranks of an ep group learn all counts, so that each knows by itself whether the rows of any of
them exceed the buffers. If they do, no rank sends a row in that layer, and the step counts what did
not fit: it is not applied.

Not seen on hardware.
"""

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from titan_moe.comm.collectives import AllToAll, start_numbers
from titan_moe.comm.symmetric_memory import Channels, DeviceAllToAll
from titan_moe.moe.config import rows_of_buffers
from titan_moe.moe.dispatch.all_to_all import AllToAllDispatcher, ExchangeRoute
from titan_moe.ops.permute_indices import Sorted


@dataclass(eq=False)
class SymmetricDispatcher(AllToAllDispatcher):
    """Exchanges rows like `AllToAllDispatcher`, through symmetric memory.

    `channels` are set when the model gets its memory. No compiled graph holds an exchange, although
    the host knows all shapes: buffers take turns, on a stream of their own.

    Args:
        capacity_factor: of `rows_of_buffers`.
    """

    capacity_factor: float | None
    channels: Channels = field(init=False)

    def route(self, experts_TK: Tensor, rows: Sorted) -> ExchangeRoute:
        ranks, (tokens, slots, counts_E) = self.ep_group.size(), rows
        table_PE = counts_E.expand(ranks, -1).contiguous()
        all_counts = start_numbers(table_PE, AllToAll.of_table(self.ep_group))
        return ExchangeRoute(tokens, slots, counts_E.view(ranks, -1), all_counts)

    def plan(self, route: ExchangeRoute) -> None:
        ranks, own, slices = self.ep_group.size(), self.ep_group.rank(), self.etp_group.size()
        route.num_rows, num_tokens = len(route.rows.source_R), len(route.rows.rows_TK)
        most_received = rows_of_buffers(
            num_tokens, self.top_k, self.config.num_experts, ranks, self.capacity_factor
        )
        counts_PPE = route.counts.wait().view(ranks, ranks, -1)  # The device waits.
        over_P = (counts_PPE.sum((0, 2)) - most_received).clamp(min=0)
        counts_PPE = counts_PPE * (over_P == 0).all()
        sent_P, received_PE = counts_PPE[own].sum(1), counts_PPE[:, own]
        # Places behind the last row count for one more expert, which nothing reads.
        filled_PE = F.pad(received_PE, (0, 1))
        filled_PE[-1, -1] = most_received - received_PE.sum()
        route.exchange, route.weights_exchange = (
            DeviceAllToAll(channel, sent_P, received_PE.sum(1), route.num_rows, most_received)
            for channel in self.channels
        )
        route.gathered = route.weights_gathered = [most_received] * slices
        route.counts_PE = self.gather_counts(filled_PE).flatten(0, 1)
        route.dropped = over_P[own]
