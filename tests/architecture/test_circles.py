"""No circle of imports stands among the modules of titan_moe.

Read from the syntax trees, so that imports inside functions and under TYPE_CHECKING count too.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.support.imports import imports_of
from tests.support.paths import REPO

# Circles that stand for now, by the import that closes each. One that is gone is deleted here too.
_KNOWN = {
    ("data.reader", "data.build"),
    ("ops.cross_entropy_triton", "ops.cross_entropy"),
    ("ops.gated_triton", "ops.gated"),
    ("runtime.host_gloo", "runtime.device"),
}


def import_graph(repo: Path) -> dict[str, set[str]]:
    """Returns the modules that each module imports, without the package's name before them."""
    paths = {
        ".".join(path.relative_to(repo / "titan_moe").with_suffix("").parts): path
        for path in (repo / "titan_moe").rglob("*.py")
        if path.name != "__init__.py"
    }
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        imported = imports_of(ast.parse(path.read_text()), path.relative_to(repo))
        graph[name] = {each for full in imported for each in _modules(full, paths)}
    return graph


def _modules(imported: str, paths: dict[str, Path]) -> Iterator[str]:
    """Yields the module of a dotted name, which may end with a name inside the module."""
    for name in (imported, imported.rpartition(".")[0]):
        if name.startswith("titan_moe.") and name.removeprefix("titan_moe.") in paths:
            yield name.removeprefix("titan_moe.")


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the modules of a circle, each of which the next one imports; empty without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_circle_of_imports_stands_but_the_known_ones() -> None:
    graph = import_graph(REPO)
    gone = {each for each in _KNOWN if each[1] not in graph.get(each[0], ())}
    assert not gone, f"delete what is gone from the known circles: {gone}"
    without = {name: {x for x in found if (name, x) not in _KNOWN} for name, found in graph.items()}
    assert circle(without) == []


def test_circles_are_found_in_functions_and_through_several_modules(tmp_path: Path) -> None:
    folder = tmp_path / "titan_moe" / "x"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("from titan_moe.x import b")
    (folder / "b.py").write_text("def f():\n    from .c import name")
    (folder / "c.py").write_text("from os import path")
    assert circle(import_graph(tmp_path)) == []
    (folder / "c.py").write_text("import titan_moe.x.a")
    assert set(circle(import_graph(tmp_path))) == {"x.a", "x.b", "x.c"}
