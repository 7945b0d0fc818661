"""No method of a live object is replaced, and no attribute is swapped around a call.

A strategy is an attribute that its class sets on `self`, and at most one function beside it. No
module is found by the attributes that it happens to have, and what differs between versions of
torch stands in a few named files.
"""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.paths import REPO
from tests.support.tiny import batch_of, make_job, tiny_step
from titan_moe.runtime.ranks import run_on_ranks

_SETS, _ASKS = "sets an attribute by its name", "asks what torch has"
_RULES = {
    r"\.forward = ": "replaces forward",
    r"\b(__)?(set|del)attr(__)?\(": _SETS,
    r"\bhasattr\(|getattr\(.*, None\)|__kwdefaults__|\.signature\(|__version__ *[<>=]": _ASKS,
    r"\n *finally:\n *(?!self\.)\w[\w.]*\.\w+ = ": "sets an attribute back",
    r"\bunittest\b": "imports unittest.mock",
}
_ALLOWED = {
    ("models/decoder.py", _SETS): "torch moves a module's buffers only with parameters",
    ("distributed/parallel_dims.py", _SETS): "a frozen dataclass's derived field",
    ("ops/float8.py", _SETS): "torchao's recipes leave out one field, frozen",
    ("ops/varlen_attention.py", _ASKS): "torch 2.11 has no enable_gqa",
    ("distributed/fsdp.py", _ASKS): "torch 2.11 and 2.12 have one buffer for reductions",
    ("distributed/dtensor.py", _ASKS): "a spec has shard_order where one was asked for",
    ("debug/hang.py", _ASKS): "CUDA builds alone have NCCL's recorder",
}
"""(file, problem) that may stand, and why."""


def violations(package: Path) -> list[tuple[str, str]]:
    """Returns each file that breaks a rule, and the rule."""
    return [
        (file, problem)
        for path in sorted(package.rglob("*.py"))
        for file in [path.relative_to(package).as_posix()]
        for rule, problem in _RULES.items()
        if re.search(rule, path.read_text())
        if (file, problem) not in _ALLOWED
    ]


def test_package_replaces_nothing_on_live_objects() -> None:
    assert violations(REPO / "titan_moe") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("block.forward = wrapped", "replaces forward"),
        ("setattr(module, name, value)", _SETS),
        ('if hasattr(model, "fast"):', _ASKS),
        ('run = getattr(model, "fast", None)', _ASKS),
        ("if torch.__version__ >= (2, 12):", _ASKS),
        ("try:\n    run()\nfinally:\n    layer.route = before", "sets an attribute back"),
        ("from unittest import mock", "imports unittest.mock"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "planted.py").write_text(text)
    assert violations(tmp_path) == [("planted.py", problem)]


_STRATEGIES = {"dispatcher", "core", "recurrence", "multiply", "cross_entropy"}
_SET_IN = {
    ("distributed/expert_parallel.py", "dispatcher"),  # Called in step 4 of parallelize.py.
    ("parallelize/parallelize.py", "cross_entropy"),
}
"""Files that set a strategy of an object other than `self`."""


def strategies_set(package: Path) -> set[tuple[str, str]]:
    """Returns the files that assign a strategy of another object, each with the strategy."""
    return {
        (path.relative_to(package).as_posix(), target.attr)
        for path in package.rglob("*.py")
        for statement in ast.walk(ast.parse(path.read_text()))
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in ast.walk(statement)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
        if target.attr in _STRATEGIES and ast.unparse(target.value) != "self"
    }


def test_strategies_are_set_when_a_model_is_laid_out_and_nowhere_else(tmp_path: Path) -> None:
    assert strategies_set(REPO / "titan_moe") == _SET_IN
    (tmp_path / "planted.py").write_text("for block in blocks:\n    block.attention.core = mine")
    assert strategies_set(tmp_path) == {("planted.py", "core")}


def _callables(model: nn.Module) -> dict[str, Any]:
    """Returns each module's class and the attributes that can be called, by name."""
    return {
        f"{name}.{attribute}": value
        for name, module in model.named_modules()
        for attribute, value in {**vars(module), "class": type(module)}.items()
        if callable(value)
    }


def _swapped_in_a_step(tables: dict[str, Any], swaps: bool) -> list[str]:
    """Returns the callables that are others at some time in a step than before it."""
    sharded, step = tiny_step(make_job("deepseek_v3", **tables))
    (model,) = sharded.parts
    attention = model.blocks()["layers.0"].attention
    core, before, swapped = attention.core, _callables(model), set()

    def look(*_: object) -> None:
        now = _callables(model)
        swapped.update(name for name in before | now if before.get(name) != now.get(name))

    def swap(*_: object) -> None:
        attention.core = (lambda *args: core(*args)) if attention.core is core else core

    for block in model.blocks().values():
        if swaps:
            block.register_forward_pre_hook(swap)
        block.register_forward_pre_hook(look)
        block.register_full_backward_hook(look)
        if swaps:
            block.register_forward_hook(swap)
    step([batch_of(0, slice(0, 2))], logged=True)
    look()
    return sorted(swapped)


_LAYOUTS: dict[str, dict[str, Any]] = {
    "experts on two ranks, recomputed by operation": {
        "parallelism": {"expert_parallel_degree": 2},
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    },
    "tensor parallel, recomputed whole": {
        "parallelism": {"tensor_parallel_degree": 2},
        "activation_checkpoint": {"mode": "full"},
    },
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_model_step_calls_what_it_called_before(layout: str) -> None:
    assert run_on_ranks(_swapped_in_a_step, 2, _LAYOUTS[layout], False) == [[], []]


def test_strategy_that_is_swapped_around_a_block_is_seen() -> None:
    (swapped,) = run_on_ranks(_swapped_in_a_step, 1, {}, True)
    assert swapped == ["layers.0.attention.core"]
