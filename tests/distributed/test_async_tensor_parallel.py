"""Asynchronous tensor parallelism trains the same model: the gate over the emulated operations."""

import pytest

from tests.support.catching import caught
from tests.support.gates import gate_of
from tests.support.planted_async_bugs import ASYNC_BUGS
from tests.support.tiers import split, tiered
from titan_moe.models.registry import FAMILIES
from titan_moe.verify.gradients.gate import Gate
from titan_moe.verify.layouts.layouts import parse, with_tables

_KEY = {"parallelism": {"enable_async_tensor_parallel": True}}
_COMPILED = {"compile": {"enable": True, "backend": "aot_eager"}}


@pytest.fixture(scope="module")
def async_gates(tmp_path_factory) -> dict[str, Gate]:
    gates = {}
    for family in FAMILIES:
        gates[family] = gate = gate_of(family, tmp_path_factory.mktemp(family))
        gate.job = with_tables(gate.job, _KEY)
    return gates


@pytest.mark.parametrize(
    "family, text",
    tiered(
        [("deepseek_v3", "tp=2,ep=2,recompute=full")],
        slow=[("gpt_oss", "tp=2"), ("qwen3", "tp=2,cp=2"), ("llama4", "pp=2,tp=2,ep=2")],
        full=[("mixtral", "tp=2,etp=2"), ("deepseek_v3", "dp_shard=2,tp=4,ep=8,recompute=2")],
    ),
)
def test_it_trains_the_same_model(async_gates: dict[str, Gate], family: str, text: str):
    result = async_gates[family].verify(parse(text))
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.slow
def test_compiled_it_trains_the_same_model(tmp_path):
    gate = gate_of("qwen3", tmp_path)
    gate.job = with_tables(with_tables(gate.job, _KEY), _COMPILED)
    result = gate.verify(parse("tp=2"))
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.parametrize("name", split(ASYNC_BUGS, ["gradients through each other's weights"]))
def test_a_planted_bug_is_caught(async_gates: dict[str, Gate], name: str, monkeypatch):
    bug = ASYNC_BUGS[name]
    caught(async_gates.__getitem__, bug, bug.caught_on, monkeypatch)
