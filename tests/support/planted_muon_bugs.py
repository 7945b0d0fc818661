"""As planted_bugs.py: mistakes in Muon."""

from tests.support.planting import Bug

_MUON = "titan_moe.optim.muon"
_ATTENTION = "parameter layers.*.attention.w*.weight*"
_EXPERTS = "parameter *.moe.experts.w*"
_BEFORE = ("gradient *", "loss *", "exp_avg*", "momentum_buffer *", "parameter *norm*")


MUON_BUGS: dict[str, Bug] = {
    "shards made orthogonal": Bug(
        f"{_MUON}:redistribute_matrices",
        "if cut is None:",
        "if True:",
        caught_on="dp_shard=2",
        named=(_ATTENTION,),
        spared=(*_BEFORE, "parameter output.weight", "parameter tok_embeddings.weight"),
        harmless_on="dp_shard=1",
    ),
    "experts' slices made orthogonal": Bug(
        f"{_MUON}:Muon._update_batch",
        "pieces, batch.cut)",
        "pieces, batch.cut if len(shape) == 2 else None)",
        caught_on="dp_shard=2,etp=2",
        named=(_EXPERTS,),
        spared=(*_BEFORE, _ATTENTION.rstrip("*")),
        harmless_on="dp_shard=2,ep=2",
    ),
    "pieces put together in another order": Bug(
        f"{_MUON}:redistribute_matrices",
        "exchange(function(whole_NAB), shares, pieces)",
        "exchange(function(whole_NAB), shares, pieces[::-1])",
        caught_on="dp_shard=2",
        named=(_ATTENTION,),
        spared=_BEFORE,
        harmless_on="dp_shard=1",
    ),
    "an expert's norm taken over all experts": Bug(
        f"{_MUON}:orthogonalized",
        "torch.linalg.matrix_norm(x, keepdim=True)",
        "torch.linalg.vector_norm(x)",
        caught_on="dp_shard=1",
        named=(_EXPERTS,),
        spared=_BEFORE,
    ),
    "updates of one size whatever the matrix": Bug(
        f"{_MUON}:Muon._update_batch",
        "* max(shape[-2:]) ** 0.5",
        "",
        caught_on="dp_shard=1",
        named=(_ATTENTION,),
        spared=_BEFORE,
    ),
    "momentum without Nesterov's": Bug(
        f"{_MUON}:Muon._directions",
        "torch._foreach_lerp_(grads, wide, self._momentum)",
        "torch._foreach_copy_(grads, wide)",
        caught_on="dp_shard=1",
        # At the first step both point the same way.
        named=(f"step 1, rank 0: {_EXPERTS}",),
        spared=(*_BEFORE, "parameter *"),
    ),
    "routers' gates updated by Muon": Bug(
        "titan_moe.optim.optimizers:is_hidden_matrix",
        "_NOT_HIDDEN & set(",
        "{'tok_embeddings', 'output'} & set(",
        caught_on="dp_shard=1",
        named=("*router.gate.weight*",),
        spared=("gradient *", "loss *", "parameter *.experts.*"),
    ),
}
