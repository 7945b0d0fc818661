"""Mistakes of the dispatchers that the gradient gate must find, as in planted_bugs.py."""

from tests.support.planted_bugs import _EP, _LAST_EXPERTS, _OUTPUT
from tests.support.planting import Bug

_ONCE = "dp_shard=2,ep=2,recompute=full,reshard=always,dispatch=deduplicated"
_NODES = "dp_shard=2,tp=2,ep=4,recompute=none,reshard=default,dispatch=nodes"
_SYMMETRIC = "dp_shard=2,ep=2,recompute=full,reshard=never,dispatch=symmetric"
_BOUNDED = "dp_shard=2,ep=2,recompute=2,reshard=always,dispatch=bounded"

DISPATCH_BUGS = {
    "of a token's experts on a rank, the first one's output alone": Bug(
        "titan_moe.moe.dispatch.deduplicated:DeduplicatedDispatcher._order",
        "RowMap(follow(slot_N // most, permuted.source_R), rows_MJ)",
        "RowMap(follow(slot_N // most, permuted.source_R), "
        "rows_MJ.where(torch.arange(most) < 1, -1))",
        caught_on=_ONCE,
        named=("loss*", "gradient *"),
        spared=("counts layers.1", "num_targets *"),
        harmless_on="dp_shard=2,ep=2",
    ),
    "a token's row copied for each expert, its gradients not added": Bug(
        "titan_moe.ops.move_rows:_GatherRows.backward",
        "return add_rows(grad_RD, rows_TK), None",
        "return add_rows(grad_RD, rows_TK[:, :1]), None",
        caught_on=_ONCE,
        named=("gradient *",),
        spared=("loss *", "counts *", "num_targets *", _LAST_EXPERTS, _OUTPUT),
    ),
    "rows that came by way of another rank taken for those of the next node": Bug(
        "titan_moe.moe.dispatch.deduplicated:DeduplicatedDispatcher._row_starts",
        "if self.nodes is None:",
        "if self.nodes is not None:",
        caught_on=_NODES,
        named=("loss*", "gradient *"),
        spared=("counts layers.1", "num_targets *"),
        harmless_on=_EP,
    ),
    "outputs leave a node without the other ranks' parts": Bug(
        "titan_moe.moe.dispatch.exchange:ExchangeDispatcher.combine_start",
        "combine_rows(_exchanged(y_ND, hop.exchange.reverse()), hop.copies)",
        "combine_rows(_exchanged(y_ND, hop.exchange.reverse()), "
        "hop.copies._replace(rows_TK=hop.copies.rows_TK[:, :1]))",
        caught_on=_NODES,
        named=("loss*", "gradient *"),
        spared=("counts layers.1", "num_targets *"),
        harmless_on=_ONCE,
    ),
    "buffers come home off by one rank": Bug(
        "titan_moe.moe.dispatch.capacity:CapacityDispatcher._buffers",
        "place_TK = place_N[rows_TK]",
        "place_TK = (place_N[rows_TK] + capacity) % size",
        caught_on=_BOUNDED,
        named=("loss*", "counts layers.2*", "gradient *"),
        spared=("counts layers.1", "num_targets *"),
        harmless_on=_ONCE,
    ),
    "buffers filled with the rows of the tokens before": Bug(
        "titan_moe.moe.dispatch.capacity:CapacityDispatcher._buffers",
        "empty[0].scatter_(0, place_N, token_N)",
        "empty[0].scatter_(0, place_N, token_N.roll(1))",
        caught_on=_BOUNDED,
        named=("loss*", "gradient *"),
        spared=("num_targets *",),
        harmless_on=_ONCE,
    ),
    "rows through symmetric memory taken for those of another rank": Bug(
        "titan_moe.moe.dispatch.symmetric:SymmetricDispatcher._device_route",
        "filled_PE = F.pad(received_PE, (0, 1))",
        "filled_PE = F.pad(received_PE.flip(0), (0, 1))",
        caught_on=_SYMMETRIC,
        named=("loss*", "gradient *"),
        spared=("counts layers.1", "num_targets *"),
        harmless_on=_EP,
    ),
    "gradients come home through symmetric memory before they are there": Bug(
        "titan_moe.distributed.symmetric_memory:DeviceAllToAll.wait",
        "return self.channel.wait(in_flight)",
        "return self.channel.wait(in_flight) * (len(in_flight) == self.most_received)",
        caught_on=_SYMMETRIC,
        named=("gradient *",),
        spared=("loss *", "counts *", "num_targets *"),
        harmless_on=_EP,
    ),
}
