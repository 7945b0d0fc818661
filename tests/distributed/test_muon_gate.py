"""Muon and narrow moments in every layout: the gate, its bugs, and states for other layouts."""

from pathlib import Path

import pytest

from tests.distributed.conftest import gate_of
from tests.distributed.planted_bugs import Bug
from tests.distributed.resharding import LEG, go_on, run
from tests.distributed.test_gate import cover
from tests.distributed.test_planted_bugs import caught, judge
from tests.distributed.test_resharding import problems
from titan_moe.verify.gradients.gate import Gate
from titan_moe.verify.layouts.layouts import depth, parse

_OPTIMIZERS = {
    "Muon": {"name": "Muon"},
    "narrow": {"name": "Muon", "state_dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def muon_gates(tmp_path_factory) -> dict[str, Gate]:
    gates = {}
    for kind, keys in _OPTIMIZERS.items():
        gate = gate_of("deepseek_v3", tmp_path_factory.mktemp(kind))
        optimizer = gate.job.optimizer.model_copy(update=keys)
        gate.job = gate.job.model_copy(update={"optimizer": optimizer})
        gates[kind] = gate
    return gates


# Besides a sample: uneven shards, and one dim of a matrix cut twice, evenly and unevenly.
LAYOUTS = [
    *cover([2, 4], 8, seed=6),
    "dp_shard=3",
    "dp_shard=2,tp=2,etp=2",
    "dp_shard=3,tp=2,ep=2",
]


@pytest.mark.parametrize("text", LAYOUTS)
def test_muon_trains_the_same_model(muon_gates: dict[str, Gate], text: str):
    result = muon_gates["Muon"].verify(parse(text))
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.parametrize("text", ["dp_shard=1", "dp_shard=2,tp=2,ep=2"])
def test_narrow_moments_are_the_same_in_every_layout(muon_gates: dict[str, Gate], text: str):
    result = muon_gates["narrow"].verify(parse(text))
    assert result.passed, "\n".join([*result.lines, result.traceback])


_MUON = "titan_moe.optim.muon"
_WHOLE = "titan_moe.distributed.whole_matrices"
_ATTENTION = "parameter layers.*.attention.w*.weight*"
_EXPERTS = "parameter *.moe.experts.w*"
_BEFORE = ("gradient *", "loss *", "exp_avg*", "momentum_buffer *", "parameter *norm*")
BUGS = {
    "shards made orthogonal": Bug(
        f"{_WHOLE}:on_whole_matrices",
        "if not cuts:",
        "if True:",
        caught_on="dp_shard=2",
        named=(_ATTENTION,),
        spared=(*_BEFORE, "parameter output.weight", "parameter tok_embeddings.weight"),
        harmless_on="dp_shard=1",
    ),
    "experts' slices made orthogonal": Bug(
        f"{_MUON}:Muon._update_batch",
        "_stacked(directions, batch), batch.cuts)",
        "_stacked(directions, batch), batch.cuts if len(shape) == 2 else [])",
        caught_on="dp_shard=2,etp=2",
        named=(_EXPERTS,),
        spared=(*_BEFORE, _ATTENTION.rstrip("*")),
        harmless_on="dp_shard=2,ep=2",
    ),
    "pieces put together in another order": Bug(
        f"{_WHOLE}:_gather_share",
        "for p, s in zip(parts, shapes, strict=True)]",
        "for p, s in zip(parts, shapes, strict=True)][::-1]",
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


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(muon_gates: dict[str, Gate], name: str, monkeypatch):
    bug = BUGS[name]
    caught(lambda family: muon_gates["Muon"], bug, bug.caught_on, monkeypatch)


@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.harmless_on])
def test_a_layout_without_its_axis_passes(muon_gates: dict[str, Gate], name: str, monkeypatch):
    bug = BUGS[name]
    result, _ = judge(muon_gates["Muon"], bug, bug.harmless_on, monkeypatch)
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.parametrize(
    "before, after", [("dp_shard=2,ep=2", "dp_shard=2,tp=2,etp=2"), ("pp=2,tp=2", "dp_shard=3")]
)
def test_a_run_goes_on_in_another_layout(tmp_path: Path, before: str, after: str):
    source, target = parse(before), parse(after)
    how = {"depth": max(depth(source), depth(target)), "optimizer": _OPTIMIZERS["narrow"]}
    reference = run("deepseek_v3", source, tmp_path / "whole", steps=2 * LEG, **how)
    ours = go_on("deepseek_v3", reference, LEG, target, tmp_path / "parts", **how)
    assert problems(reference, ours, reference, LEG) == []
