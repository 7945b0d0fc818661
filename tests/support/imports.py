"""Reads the imports of a Python file from its syntax tree."""

import ast
from collections.abc import Iterator
from pathlib import Path


def imports_of(tree: ast.Module, path: Path) -> Iterator[str]:
    """Dotted names of all imported modules, and of what is imported from them."""
    package = path.parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join((*parts, *(node.module or "").split("."))).strip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) == "import_module":
            # A name put together at run time is the registry's: it starts with an f-string.
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _name(function: ast.expr) -> str:
    """The last part of a called function's name."""
    return getattr(function, "attr", None) or getattr(function, "id", "")
