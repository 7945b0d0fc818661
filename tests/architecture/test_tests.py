"""Tests share helpers through tests/support alone, and planted bugs have a line to replace."""

import ast
from pathlib import Path

import pytest

from tests.support.catching import BUGS
from tests.support.imports import imports_of
from tests.support.paths import REPO
from tests.support.planted_muon_bugs import MUON_BUGS
from tests.support.planting import Bug, right_source


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


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("unit/ops/test_a.py", "from tests.unit.ops.test_b import check"),
        ("unit/ops/test_a.py", "def f():\n    from .test_b import check"),
        ("distributed/test_a.py", "from tests.distributed.conftest import gates"),
        ("support/a.py", "import tests.unit.ops.test_b"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, path: str, text: str) -> None:
    file = tmp_path / "tests" / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (line,) = violations(tmp_path)
    assert line.startswith(f"tests/{path}: imports tests.")


def test_helpers_may_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "tests" / "unit" / "test_a.py"
    file.parent.mkdir(parents=True)
    file.write_text("from tests.support.tiny import tiny\nfrom tests.support import paths")
    assert violations(tmp_path) == []


PLANTED = list({**BUGS, **MUON_BUGS}.items())


@pytest.mark.parametrize("bug", [bug for _, bug in PLANTED], ids=[name for name, _ in PLANTED])
def test_a_planted_bugs_line_stands_once_in_its_function(bug: Bug) -> None:
    right_source(bug)


@pytest.mark.parametrize(
    "changed",
    [{"right": "no such line"}, {"right": "\n"}, {"where": "titan_moe.trainer:no_such_function"}],
)
def test_a_bug_without_its_line_is_noticed(changed: dict[str, str]) -> None:
    with pytest.raises((AssertionError, AttributeError)):
        right_source(PLANTED[0][1]._replace(**changed))
