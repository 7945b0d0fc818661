"""Each broken promise names a line that stands once in its file, and tests that exist.

tests/integration/test_broken_promises.py runs those tests with the line broken.
"""

import ast

import pytest

from tests.support.broken_promises import Broken, read_promises
from tests.support.paths import REPO

PROMISES = read_promises()


@pytest.mark.parametrize("broken", PROMISES, ids=[broken.name for broken in PROMISES])
def test_broken_promise_is_one_mistake_with_tests(broken: Broken) -> None:
    assert broken.right != broken.wrong
    text = broken.break_file(REPO)
    if broken.file.endswith(".py"):
        ast.parse(text)
    words = broken.test_arguments()
    paths = [word.partition("::")[0] for word in words if word.startswith("tests/")]
    assert paths and all((REPO / path).exists() for path in paths)
