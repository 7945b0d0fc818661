"""What one reads is what runs: no method of a live object is replaced, nothing is swapped around a
call, and no module is found by the attributes that it happens to have.

Read from the syntax trees. A strategy is an attribute that its class sets on `self`; other code may
set it, once, when it lays the model out.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_REPO = Path(__file__).parents[2]
_SETTERS = ("setattr", "delattr", "__setattr__", "__delattr__")
# File and problem -> why it may be.
_ALLOWED = {
    ("models/decoder.py", "calls setattr"): "torch moves a module's buffers only with parameters",
    ("distributed/parallel_dims.py", "calls __setattr__"): "a frozen dataclass's derived field",
    ("distributed/sharding.py", "calls __setattr__"): "a frozen dataclass's normal form",
    ("ops/float8.py", "calls __setattr__"): "torchao's recipes leave out one field, frozen",
}

Problem = tuple[str, str]
"""The file below titan_moe, and what is wrong."""


def violations(package: Path) -> list[Problem]:
    """All in the package that `_ALLOWED` does not name."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    methods = {name for tree in trees.values() for name in _methods(tree)}
    attributes = {name for tree in trees.values() for name in _attributes(tree)}
    found = []
    for path, tree in trees.items():
        file = path.relative_to(package).as_posix()
        found += [(file, problem) for problem in _problems(tree, methods - attributes)]
    return [problem for problem in found if problem not in _ALLOWED]


def _methods(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (each.name for each in node.body if isinstance(each, ast.FunctionDef))


def _attributes(tree: ast.Module) -> Iterator[str]:
    """A class's fields, and what it sets on itself, if it is no method of the same class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            names = (name for holder, name in _assigned(node) if holder == "self")
            yield from (name for name in names if name not in own)
            yield from (ast.unparse(e.target) for e in node.body if isinstance(e, ast.AnnAssign))


def _assigned(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(holder, attribute) of every `holder.attribute = ...`."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        for target in targets:
            each = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            for one in each:
                if isinstance(one, ast.Attribute):
                    yield ast.unparse(one.value), one.attr


def _problems(tree: ast.Module, methods: set[str]) -> Iterator[str]:
    for holder, name in _assigned(tree):
        if name == "forward" or (name in methods and holder != "ctx"):  # ctx: autograd's.
            yield f"replaces {holder}.{name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            called = node.func.attr if isinstance(node.func, ast.Attribute) else called
            if called in _SETTERS:
                yield f"calls {called}"
            if called == "hasattr":
                yield "calls hasattr"
        elif isinstance(node, ast.Try):
            for last in node.finalbody:
                for holder, name in _assigned(last):
                    if holder != "self":
                        yield f"sets {holder}.{name} back"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [f"{getattr(node, 'module', '')}.{alias.name}" for alias in node.names]
            if any("unittest" in name for name in names):
                yield "imports unittest.mock"


def test_the_package_keeps_its_seams() -> None:
    assert violations(_REPO / "titan_moe") == []


PLANTED = {
    "layer.plan = other": "replaces layer.plan",
    "block.forward, x = wrapped, 1": "replaces block.forward",
    "setattr(module, name, value)": "calls setattr",
    "try:\n    run()\nfinally:\n    layer.routing_fn = before": "sets layer.routing_fn back",
    "from unittest import mock": "imports unittest.mock",
}


@pytest.mark.parametrize("text", PLANTED)
def test_planted_violation_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "layer.py").write_text("class Layer:\n    def plan(self, x): ...")
    (tmp_path / "planted.py").write_text(text)
    assert ("planted.py", PLANTED[text]) in violations(tmp_path)
