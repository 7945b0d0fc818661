"""No method of a live object is replaced, and no attribute is swapped around a call.

A strategy is an attribute that its class sets on `self`. No module is found by the attributes that
it happens to have.
"""

import re
from pathlib import Path

import pytest

from tests.support.paths import REPO

_RULES = {
    r"\.forward = ": "replaces forward",
    r"\b(__)?(set|del)attr(__)?\(": "sets an attribute by its name",
    r"\bhasattr\(": "asks for an attribute",
    r"\n *finally:\n *(?!self\.)\w[\w.]*\.\w+ = ": "sets an attribute back",
    r"\bunittest\b": "imports unittest.mock",
}
_ALLOWED = {
    "models/decoder.py": "torch moves a module's buffers only with parameters",
    "distributed/parallel_dims.py": "a frozen dataclass's derived field",
    "distributed/sharding.py": "a frozen dataclass's normal form",
    "ops/float8.py": "torchao's recipes leave out one field, frozen",
}
"""Files that set an attribute by its name, and why."""


def violations(package: Path) -> list[tuple[str, str]]:
    """Returns each file that breaks a rule, and the rule."""
    return [
        (file, problem)
        for path in sorted(package.rglob("*.py"))
        for file in [path.relative_to(package).as_posix()]
        for rule, problem in _RULES.items()
        if re.search(rule, path.read_text())
        if not (file in _ALLOWED and "by its name" in problem)
    ]


def test_package_replaces_nothing_on_live_objects() -> None:
    assert violations(REPO / "titan_moe") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("block.forward = wrapped", "replaces forward"),
        ("setattr(module, name, value)", "sets an attribute by its name"),
        ("try:\n    run()\nfinally:\n    layer.route = before", "sets an attribute back"),
        ("from unittest import mock", "imports unittest.mock"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "planted.py").write_text(text)
    assert violations(tmp_path) == [("planted.py", problem)]
