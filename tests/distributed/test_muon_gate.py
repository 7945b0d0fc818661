"""Muon and narrow moments in every layout: the gate, its bugs, and states for other layouts."""

from pathlib import Path

import pytest

from tests.support.catching import caught, judge
from tests.support.gates import cover, gate_of
from tests.support.planted_muon_bugs import MUON_BUGS
from tests.support.resharding import LEG, go_on, problems, run
from tests.support.tiers import split, tiered
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


@pytest.mark.parametrize("text", split(LAYOUTS, ["dp_shard=2,tp=2,etp=2"]))
def test_muon_trains_the_same_model(muon_gates: dict[str, Gate], text: str):
    result = muon_gates["Muon"].verify(parse(text))
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.parametrize("text", tiered([], slow=["dp_shard=2,tp=2,ep=2"], full=["dp_shard=1"]))
def test_narrow_moments_are_the_same_in_every_layout(muon_gates: dict[str, Gate], text: str):
    result = muon_gates["narrow"].verify(parse(text))
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.parametrize("name", split(MUON_BUGS, ["shards made orthogonal"]))
def test_a_planted_bug_is_caught(muon_gates: dict[str, Gate], name: str, monkeypatch):
    bug = MUON_BUGS[name]
    caught(lambda family: muon_gates["Muon"], bug, bug.caught_on, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, bug in MUON_BUGS.items() if bug.harmless_on])
def test_a_layout_without_its_axis_passes(muon_gates: dict[str, Gate], name: str, monkeypatch):
    bug = MUON_BUGS[name]
    result, _ = judge(muon_gates["Muon"], bug, bug.harmless_on, monkeypatch)
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after", [("dp_shard=2,ep=2", "dp_shard=2,tp=2,etp=2"), ("pp=2,tp=2", "dp_shard=3")]
)
def test_a_run_goes_on_in_another_layout(tmp_path: Path, before: str, after: str):
    source, target = parse(before), parse(after)
    how = {"depth": max(depth(source), depth(target)), "optimizer": _OPTIMIZERS["narrow"]}
    reference = run("deepseek_v3", source, tmp_path / "whole", steps=2 * LEG, **how)
    ours = go_on("deepseek_v3", reference, LEG, target, tmp_path / "parts", **how)
    assert problems(reference, ours, reference, LEG) == []
