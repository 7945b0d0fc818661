"""Tests share helpers through tests/support alone, and planted bugs have a line to replace."""

import ast
from pathlib import Path

import pytest

from tests.support.catching import BUGS
from tests.support.imports import imports_of
from tests.support.paths import REPO
from tests.support.planting import right_source


def violations(repo: Path) -> list[str]:
    """One line for each file of tests/ that imports a test module, or a conftest."""
    found = []
    for path in sorted(repo.glob("tests/**/*.py")):
        name = path.relative_to(repo)
        for imported in sorted(set(imports_of(ast.parse(path.read_text()), name))):
            top, _, rest = imported.partition(".")
            if top == "tests" and rest.partition(".")[0] not in ("fuzz", "support"):
                found.append(f"{name}: imports {imported}: move it to tests/support")
    return found


def test_no_test_module_imports_another() -> None:
    assert violations(REPO) == []


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_has_one_line_in_its_function(name: str) -> None:
    right_source(BUGS[name])
