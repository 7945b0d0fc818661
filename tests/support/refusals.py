"""Every line that titan_moe may refuse something with, read from its source.

A line is what a RunError or ConfigError is made of, or what is printed as such, and what the
functions return that it comes from. The rules of `config/checks` stand in lists, so all of their
lines count.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

_TAKE_LINES = (
    *("RunError", "ConfigError", "TrainingError", "TraceError", "RefusedError"),
    *("print_errors", "report", "_on_loss"),
)
_VALUE = "3"
"""Stands for what a line is about."""
_FIRST_VALUES = {
    "config/": "training.steps=3",
    "data/": "training.dataset=3",
    "models/registry.py": "model.name=3",
}
"""The same where lines of these files begin with it: there it is a key."""


@cache
def refusals(root: Path) -> dict[str, str]:
    """By line, the file below `root` that makes it."""
    return _Source(root).lines()


class _Source:
    """All modules of a package."""

    def __init__(self, root: Path) -> None:
        self._functions: dict[str, list[tuple[str, ast.FunctionDef]]] = {}
        self._constants: dict[tuple[str, str], str] = {}
        self._found: dict[str, str] = {}
        self._seen: set[ast.AST] = set()
        for path in sorted(root.rglob("*.py")):
            file, module = path.relative_to(root).as_posix(), ast.parse(path.read_text())
            for node in ast.walk(module):
                if isinstance(node, ast.FunctionDef):
                    self._functions.setdefault(node.name, []).append((file, node))
            for node in module.body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    self._constants[file, ast.unparse(node.targets[0])] = str(node.value.value)

    def lines(self) -> dict[str, str]:
        for file, function in [each for named in self._functions.values() for each in named]:
            if file.startswith("config/checks/") and _gives(function) == "list[str]":
                self._follow_returned(file, function)
            for node in _own_nodes(function):
                if isinstance(node, ast.Call):
                    self._read_call(node, file, function)
        return self._found

    def _read_call(self, node: ast.Call, file: str, function: ast.FunctionDef) -> None:
        if _name(node) in _TAKE_LINES:
            for argument in node.args:
                self._follow(argument, file, function)
        for keyword in node.keywords:  # distributed.agreement adds the reason.
            if keyword.arg == "doing":
                for each in (keyword.value, *_sources(keyword.value, function)):
                    if text := self._words(each, file):
                        self._found.setdefault(f"{text}: {_VALUE}", file)

    def _follow_returned(self, file: str, function: ast.FunctionDef) -> None:
        """What a function of text returns or yields."""
        if "str" not in _gives(function):
            return
        for node in _own_nodes(function):
            if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None:
                self._follow(node.value, file, function)

    def _follow(self, node: ast.expr, file: str, function: ast.FunctionDef) -> None:
        """The lines that an expression of `function` comes from."""
        if node in self._seen:
            return
        self._seen.add(node)
        if text := self._words(node, file):
            if " " in text:
                self._found.setdefault(text, file)
            return
        if isinstance(node, ast.Call):
            for there, called in self._functions.get(_name(node), []):
                self._follow_returned(there, called)
        for source in _sources(node, function):
            self._follow(source, file, function)

    def _words(self, node: ast.expr, file: str) -> str:
        """Those of a literal; empty for what is none."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            first, *others = (self._part(part, file) for part in node.values)
            if first == _VALUE:
                keys = (key for place, key in _FIRST_VALUES.items() if file.startswith(place))
                first = next(keys, _VALUE)
            return "".join([first, *others])
        if isinstance(node, ast.BinOp):
            left, right = self._words(node.left, file), self._words(node.right, file)
            return left and left + (right or _VALUE if isinstance(node.op, ast.Add) else "")
        return ""

    def _part(self, part: ast.expr, file: str) -> str:
        """Of an f-string of a file."""
        if isinstance(part, ast.Constant):
            return str(part.value)
        assert isinstance(part, ast.FormattedValue)
        return self._constants.get((file, ast.unparse(part.value)), _VALUE)


def _gives(function: ast.FunctionDef) -> str:
    return "" if function.returns is None else ast.unparse(function.returns)


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Without those of functions within it."""
    nodes: list[ast.AST] = list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, ast.FunctionDef):
            nodes += ast.iter_child_nodes(node)


def _name(node: ast.Call) -> str:
    return getattr(node.func, "id", "") or getattr(node.func, "attr", "")


def _sources(node: ast.expr, function: ast.FunctionDef) -> Iterable[ast.expr]:
    """The expressions that the lines of one come from."""
    if isinstance(node, ast.Name):
        return _assigned(node.id, function)
    if isinstance(node, (ast.List, ast.Tuple)):
        return node.elts
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        return [node.elt]
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, (ast.NamedExpr, ast.Starred)):
        return [node.value]
    return node.args if isinstance(node, ast.Call) and _name(node) == "join" else []


def _assigned(name: str, function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What a local name is bound to, or has added."""
    for node in _own_nodes(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _bound(name, target, node.value)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value:
            yield from _bound(name, node.target, node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.append":
            yield from node.args


def _bound(name: str, target: ast.expr, value: ast.expr) -> Iterator[ast.expr]:
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    values = value.elts if isinstance(value, ast.Tuple) else [value] * len(targets)
    pairs = zip(targets, values, strict=True)
    yield from (each for own, each in pairs if isinstance(own, ast.Name) and own.id == name)
