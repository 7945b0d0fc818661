"""The list of broken promises names lines and tests that are there.

tests/integration/test_broken_promises.py sees each of them fail.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.support.broken_promises import Broken, read_promises
from tests.support.paths import REPO

PROMISES = read_promises()


def problems(promises: Sequence[Broken]) -> Iterator[str]:
    """A line for each entry that is no mistake, or has no tests."""
    for name, times in Counter(broken.name for broken in promises).items():
        if times > 1:
            yield f"{name}: stands there {times} times"
    for broken in promises:
        yield from (f"{broken.name}: {problem}" for problem in _problems(broken))


def _problems(broken: Broken) -> Iterator[str]:
    try:
        text = broken.break_file(REPO)
        if broken.file.endswith(".py"):
            ast.parse(text)
    except (AssertionError, OSError, SyntaxError) as error:
        yield str(error)
    if broken.right == broken.wrong:
        yield "the line is as before"
    paths = [word.partition("::")[0] for word in broken.test_arguments() if word[:6] == "tests/"]
    if not paths:
        yield "names no tests"
    for path in paths:
        if not (REPO / path).exists():
            yield f"there is no {path}"


def test_each_entry_is_one_mistake_with_tests() -> None:
    assert list(problems(PROMISES)) == []
