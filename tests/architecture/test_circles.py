"""No circle of imports stands among the modules of titan_moe.

Read from the syntax trees, so that imports inside functions and under TYPE_CHECKING count too.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.support.imports import imports_of
from tests.support.paths import REPO


def import_graph(repo: Path) -> dict[str, set[str]]:
    """Returns the modules of titan_moe that each of them imports."""
    paths = [path.relative_to(repo) for path in (repo / "titan_moe").rglob("*.py")]
    names = {".".join(path.with_suffix("").parts): path for path in paths}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for imported in imports_of(ast.parse((repo / path).read_text()), path):
            # The name may end with one inside the module.
            graph[name] |= names.keys() & {imported, imported.rpartition(".")[0]}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the modules of a circle, each of which the next one imports; empty without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_modules_import_each_other_in_no_circle() -> None:
    assert circle(import_graph(REPO)) == []


def test_circles_are_found_in_functions_and_through_several_modules(tmp_path: Path) -> None:
    folder = tmp_path / "titan_moe" / "x"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("from titan_moe.x import b")
    (folder / "b.py").write_text("def f():\n    from .c import name")
    (folder / "c.py").write_text("from os import path")
    assert circle(import_graph(tmp_path)) == []
    (folder / "c.py").write_text("import titan_moe.x.a")
    assert set(circle(import_graph(tmp_path))) == {f"titan_moe.x.{name}" for name in "abc"}
