"""The list of broken promises names lines and tests that are there.

tests/integration/test_broken_promises.py sees each of them fail.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.broken_promises import Broken, read_promises
from tests.support.broken_tree import Outcome
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


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"right": "no such line"}, "0 times, not once"),
        ({"right": "\n"}, "times, not once"),
        ({"file": "titan_moe/none.py"}, "No such file"),
        ({"wrong": "("}, "was never closed"),
        ({"wrong": PROMISES[0].right}, "the line is as before"),
        ({"tests": "-k all"}, "names no tests"),
        ({"tests": "tests/unit/test_none.py::test_a"}, "there is no tests/unit/test_none.py"),
    ],
)
def test_an_entry_that_is_none_is_named(changed: dict[str, Any], told: str) -> None:
    (line,) = problems([PROMISES[0]._replace(**changed)])
    assert line.startswith(PROMISES[0].name) and told in line


def test_two_promises_of_one_name_are_named() -> None:
    (line,) = problems([PROMISES[0], PROMISES[1], PROMISES[0]])
    assert line == f"{PROMISES[0].name}: stands there 2 times"


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (Outcome(1, ["a"], [], ""), ""),
        (Outcome(1, ["a"], ["a"], ""), "a test ran into its time limit"),
        (Outcome(1, [], [], ""), "no test was run"),
        (Outcome(0, [], [], ""), "all of its tests pass"),
        (Outcome(2, [], [], ""), "a file of tests cannot be imported"),
        (Outcome(4, [], [], ""), "pytest ends with 4"),
        (Outcome(5, [], [], ""), "there is no such test"),
        (Outcome(-1, [], [], ""), "not done after 900 s"),
    ],
)
def test_only_a_test_that_fails_has_seen_a_mistake(outcome: Outcome, problem: str) -> None:
    assert outcome.problem() == problem


def test_where_the_mistake_is_to_wait_a_time_limit_shows_it() -> None:
    assert Outcome(1, ["a"], ["a"], "").problem(waits=True) == ""
