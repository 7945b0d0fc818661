"""No method of a live object is replaced, and no attribute is swapped around a call.

A strategy is an attribute that its class sets on `self`. No module is found by the attributes that
it happens to have, and what differs between versions of torch stands in a few named files.
"""

import re
from pathlib import Path

import pytest

from tests.support.paths import REPO

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
    ("distributed/sharding.py", _SETS): "a frozen dataclass's normal form",
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
