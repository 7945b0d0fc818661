"""Each promise of tests/broken_promises has a test that fails when its line is wrong.

A server in a copy of the repository forks for each: seconds instead of torch's import.
"""

from collections.abc import Iterator

import pytest

from tests.support.broken_promises import Broken, read_promises
from tests.support.broken_tree import Tree
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
