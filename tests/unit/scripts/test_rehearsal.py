"""The places where a rehearsed step may copy or wait exist, and nothing else is allowed.

scripts/rehearse.sh itself needs torch's CUDA build; its --controls plant what it must find.
"""

import ast
from types import SimpleNamespace

import pytest

from scripts.rehearsal.ledger import Ledger
from scripts.rehearsal.places import COPIES, WAITS, Place
from tests.support.paths import REPO

_ALLOWED = sorted({*COPIES, *WAITS})


@pytest.mark.parametrize("where", [where for where in _ALLOWED if not where.startswith("torch/")])
def test_place_that_may_copy_or_wait_exists(where: str):
    path, _, function = where.partition(":")
    tree = ast.parse((REPO / "titan_moe" / path).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert function in names


@pytest.mark.parametrize(
    ("where", "calls", "found"),
    [
        ("comm/collectives.py:read", 1, False),  # Once a step.
        ("comm/collectives.py:read", 2, True),
        ("moe/dispatch/all_to_all.py:plan", 6, False),  # Once a layer and microbatch.
        ("moe/dispatch/all_to_all.py:plan", 7, True),
        ("moe/layer.py:forward", 1, True),
    ],
)
def test_wait_beyond_what_is_allowed_is_found(where: str, calls: int, found: bool):
    ledger = Ledger()
    ledger.waits[Place(where, 1), "tolist"] += calls
    assert bool(list(ledger.judged(waits_in_layers=6))) == found


@pytest.mark.parametrize(("is_step", "number"), [(False, 0), (True, 1)])
def test_communicator_that_a_step_makes_is_found(is_step: bool, number: int):
    ledger, group = Ledger(is_step=is_step), SimpleNamespace(size=lambda: 2, group_name="tp")
    for _ in range(2):
        ledger.communicated("all_reduce", group, {"cuda"})
    found = list(ledger.judged(waits_in_layers=0))
    assert [finding.kind for finding in found] == ["late communicator"] * number
