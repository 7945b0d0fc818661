"""Mistakes of the dispatchers that the gradient gate must find, as in planted_bugs.py."""

from tests.support.planted_bugs import _EP, _LAST_EXPERTS, _OUTPUT, Bug

_ONCE = "dp_shard=2,ep=2,recompute=full,reshard=always,dispatch=deduplicated"
_NODES = "dp_shard=2,tp=2,ep=4,recompute=full,reshard=never,dispatch=nodes"
_BOUNDED = "dp_shard=2,ep=2,recompute=2,reshard=always,dispatch=bounded"

DISPATCH_BUGS = {
    "of a token's experts on a rank, the first one's output alone": Bug(
        "titan_moe.moe.ragged:_add",
        "if len(place_M):",
        "if not len(place_M):",
        caught_on=_ONCE,
        named=("loss*", "gradient *"),
        spared=("counts layers.1", "num_targets *"),
        harmless_on="dp_shard=2,ep=2",
    ),
    "a token's row copied for each expert, its gradients not added": Bug(
        "titan_moe.moe.ragged:_Copy.backward",
        "return _add(grad_RD, ctx.copies), None",
        "return _add(grad_RD, ctx.copies._replace(place_N=ctx.copies.place_N[: "
        "ctx.copies.sizes[0]], sizes=ctx.copies.sizes[:1])), None",
        caught_on=_ONCE,
        named=("gradient *",),
        spared=("loss *", "counts *", "num_targets *", _LAST_EXPERTS, _OUTPUT),
        harmless_on=_EP,
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
        "titan_moe.moe.dispatch.deduplicated:DeduplicatedDispatcher.combine",
        "y_MD = add_ragged(wait_rows(start_rows(y_MD, home), home), hop.copies)",
        "y_MD = add_ragged(wait_rows(start_rows(y_MD, home), home), hop.copies if "
        "hop is arrival.first else hop.copies._replace(place_N=hop.copies.place_N["
        ": hop.copies.sizes[0]], sizes=hop.copies.sizes[:1]))",
        caught_on=_NODES,
        named=("loss*", "gradient *"),
        spared=("counts layers.1", "num_targets *"),
        harmless_on=_ONCE,
    ),
    "buffers come home off by one rank": Bug(
        "titan_moe.moe.dispatch.capacity:BoundedDispatcher.combine",
        "return add_present(y_BD,",
        "return add_present(y_BD.roll(plan.capacity, 0),",
        caught_on=_BOUNDED,
        named=("loss*", "counts layers.2*", "gradient *"),
        spared=("counts layers.1", "num_targets *"),
        harmless_on=_ONCE,
    ),
    "buffers filled with the rows of the tokens before": Bug(
        "titan_moe.moe.dispatch.capacity:BoundedDispatcher.plan",
        "token_B=empty[0].scatter_(0, place_N, tokens.token_N)",
        "token_B=empty[0].scatter_(0, place_N, tokens.token_N.roll(1))",
        caught_on=_BOUNDED,
        named=("loss*", "gradient *"),
        spared=("num_targets *",),
        harmless_on=_ONCE,
    ),
}
