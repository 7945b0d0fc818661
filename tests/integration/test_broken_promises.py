"""Each promise of tests/broken_promises has a test that fails when its line is wrong.

A server in a copy of the repository forks for each: seconds instead of torch's import.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.broken_promises import Broken, read_promises
from tests.support.broken_tree import Outcome, Tree
from tests.support.paths import REPO

PROMISES = read_promises()


def problem_of(tree: Tree, broken: Broken) -> str:
    """Why no test has seen the mistake; "" if one has."""
    with tree.changed(broken.file, broken.break_file(tree.root)):
        outcome = tree.run(broken.test_arguments())
    if problem := outcome.problem(waits=broken.waits):
        return f"{broken.name}: {problem}\n{outcome.told[-4000:]}"
    (first, *_) = outcome.failed
    return "" if tree.passes(first) else f"{broken.name}: {first} fails without the mistake too"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    tree = Tree(REPO, tmp_path_factory.mktemp("broken"))
    yield tree
    tree.close()


@pytest.mark.full
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("broken", PROMISES, ids=[each.name for each in PROMISES])
def test_a_broken_promise_is_seen(tree: Tree, broken: Broken) -> None:
    problem = problem_of(tree, broken)
    assert not problem, problem


_TESTS = """
import time
from pathlib import Path
import pytest
from program import double

def test_double(): assert double(2) == 4
@pytest.mark.slow
def test_slowly(): assert double(4) == 8
def test_ends(): assert double(3) == 6 or time.sleep(60)
def test_none(): pass
def test_never(): assert "return" not in Path("program.py").read_text()
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Tree]:
    """A repository of one function, and a copy of it."""
    source = tmp_path / "source"
    files = {
        "program.py": "def double(x):\n    return 2 * x\n",
        "tests/test_program.py": _TESTS,
        "titan_moe/testing/process_pool.py": "TIMEOUT_S = 300.0\n",
    }
    files |= {name: (REPO / name).read_text() for name in ("pyproject.toml", "tests/conftest.py")}
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    subprocess.run(["git", "init", "-q", source], check=True)
    tree = Tree(source, tmp_path)
    yield tree
    tree.close()


@pytest.mark.slow
def test_a_mistake_has_been_seen_where_a_test_fails_by_it_alone(program: Tree) -> None:
    broken = Broken("program", "it doubles", "program.py", "2 * x", "3 * x", "-k double")
    said = {
        "-k double": "",
        "-k slowly --tier slow": "",
        "-k none": "all of its tests pass",
        "-k nowhere": "there is no such test",
        "-k ends --timeout=1": "a test ran into its time limit",
        "tests/test_other.py": "pytest ends with 4",
        "-k never": "tests/test_program.py::test_never fails without the mistake too",
    }
    for tests, problem in said.items():
        first, *_ = problem_of(program, broken._replace(tests=tests)).splitlines() or [""]
        assert first == (problem and f"program: it doubles: {problem}")
    assert "a test ran" not in problem_of(
        program, broken._replace(tests="-k ends --timeout=1", waits=True)
    )
    cannot_be_imported = broken._replace(right="def double", wrong="def single")
    assert "cannot be imported" in problem_of(program, cannot_be_imported)
    assert program.run(["-k", "double"]).exit_code == 0, "the file is as it was"
    assert isinstance(program.run([]), Outcome)
