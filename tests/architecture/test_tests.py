"""Tests share helpers through tests/support alone, and planted mistakes have lines to replace."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.broken_promises import Broken, read_promises
from tests.support.catching import BUGS
from tests.support.imports import imports_of
from tests.support.paths import REPO
from tests.support.planting import right_source


def violations(repo: Path) -> list[str]:
    """One line for each file of tests/ that imports a test module, or a conftest, or that starts a
    process whose signals are the suite's own."""
    found = []
    for path in sorted(repo.glob("tests/**/*.py")):
        name = path.relative_to(repo)
        tree = ast.parse(path.read_text())
        if path.stem != "processes" and any(_starts(node) for node in ast.walk(tree)):
            found.append(f"{name}: Popen: call start_process of tests/support/processes.py")
        for imported in sorted(set(imports_of(tree, name))):
            top, _, rest = imported.partition(".")
            if top == "tests" and rest.partition(".")[0] not in ("fuzz", "support"):
                found.append(f"{name}: imports {imported}: move it to tests/support")
    return found


def _starts(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Popen")


def test_tests_share_helpers_and_start_processes_through_support_alone() -> None:
    assert violations(REPO) == []


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_has_one_line_in_its_function(name: str) -> None:
    right_source(BUGS[name])


@pytest.mark.parametrize("broken", read_promises(), ids=lambda broken: broken.name)
def test_broken_promise_is_one_mistake_with_tests(broken: Broken) -> None:
    """tests/integration/test_broken_promises.py runs those tests with the line broken."""
    assert broken.right != broken.wrong
    text = broken.break_file(REPO)
    if broken.file.endswith(".py"):
        ast.parse(text)
    words = broken.test_arguments()
    paths = [word.partition("::")[0] for word in words if word.startswith("tests/")]
    files = [REPO / path for path in paths]
    assert files and all(file.exists() for file in files)
    # A filter that selects no test would be seen in the full tier alone.
    wanted = words[words.index("-k") + 1] if "-k" in words else ""
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    # Tests by their names, cases by what stands in quotes or by functions.
    known = " ".join(re.findall(r"def \w+|\"[^\"\n]*\"", text)).lower()
    lost = [each for each in re.findall(r"\w+", wanted) if each.lower() not in known]
    assert not {*lost} - {"and", "or", "not"}
