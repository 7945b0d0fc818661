"""The rules of scripts/rehearse.sh, which itself needs torch's CUDA build and is run by hand."""

import ast
from dataclasses import dataclass

import pytest

from scripts.rehearsal.ledger import Ledger
from scripts.rehearsal.places import (
    COPIES,
    FIRST_PAIRS,
    WAITS,
    Place,
    place_of,
)
from tests.support.paths import REPO

_ALLOWED = sorted({*COPIES, *WAITS, *FIRST_PAIRS})
_READ = Place("distributed/collectives.py:read", 1)
_ROUTE = Place("moe/dispatch/all_to_all.py:_route", 1)


@dataclass
class Group:
    """As much of a process group as the rules ask for."""

    group_name: str
    num_ranks: int

    def size(self) -> int:
        return self.num_ranks


@pytest.mark.parametrize("where", [where for where in _ALLOWED if not where.startswith("torch/")])
def test_a_place_that_may_copy_or_wait_exists(where: str):
    path, _, function = where.partition(":")
    tree = ast.parse((REPO / "titan_moe" / path).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert function in names


def test_a_loop_of_python_is_no_place_of_its_own():
    path = str(REPO / "titan_moe/moe/layer.py")
    assert place_of(path, "route") == "moe/layer.py:route"
    assert place_of(path, "<listcomp>") is None


def judged(ledger: Ledger) -> list[str]:
    found = ledger.judged(num_moe_layers=3, num_microbatches=2)
    return [f"{finding.kind} at {finding.place.where}" for finding in found]


def test_a_step_waits_once_and_once_per_moe_layer_and_microbatch():
    ledger = Ledger()
    ledger.waits.update({(_READ, "tolist"): 1, (_ROUTE, "tolist"): 6})
    assert judged(ledger) == []
    ledger.waits.update({(_READ, "tolist"): 1, (_ROUTE, "tolist"): 1})
    assert judged(ledger) == [f"wait at {_READ.where}", f"wait at {_ROUTE.where}"]


def test_a_copy_or_a_wait_anywhere_else_is_found():
    ledger = Ledger()
    place = Place("moe/layer.py:forward", 1)
    ledger.copies[place, "cuda to cpu"] += 1
    ledger.waits[place, "item"] += 1
    assert judged(ledger) == [f"copy at {place.where}", f"wait at {place.where}"]


def test_a_pair_may_not_be_the_first_to_use_a_group_of_three():
    ledger = Ledger()
    ledger.communicated("send", Group("two", 2), {"cuda"})
    ledger.communicated("allreduce_", Group("met", 3), {"cuda"})
    ledger.communicated("send", Group("met", 3), {"cuda"})
    assert ledger.findings == []
    ledger.communicated("send", Group("new", 3), {"cuda"})
    assert [finding.kind for finding in ledger.findings] == ["hang"]


def test_a_collective_of_a_tensor_on_the_host_is_found():
    ledger = Ledger()
    ledger.communicated("allreduce_", Group("all", 8), {"cpu"})
    assert [finding.kind for finding in ledger.findings] == ["wrong device"]
