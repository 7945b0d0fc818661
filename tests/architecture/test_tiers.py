"""Tiers leave out the tests above them, and slow default tests warn or fail."""

import pytest

from tests.support.paths import REPO

pytest_plugins = "pytester"

_TESTS = """
import time
import pytest

def test_quick(): pass
def test_slept(): time.sleep(0.3)
@pytest.mark.slow
def test_slow(): time.sleep(0.3)
@pytest.mark.full
@pytest.mark.parametrize("n", range(40))
def test_full(n): pass
@pytest.mark.skip(reason="no such device")
def test_skipped(): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest((REPO / "tests" / "conftest.py").read_text())
    pytester.makepyfile(_TESTS)
    pytester.makeini("[pytest]\nmarkers = slow\n    full\nslices = 4\naddopts = -rs")
    return pytester


def run(suite: pytest.Pytester, *options: str) -> pytest.RunResult:
    return suite.runpytest_inprocess("-p", "no:xdist", "-p", "no:cacheprovider", *options)


@pytest.mark.parametrize(
    ("tier", "passed", "left"),
    [
        ("default", 2, ["left out: 1 tests of tier slow", "left out: 40 tests of tier full"]),
        ("slow", 3, ["left out: 40 tests of tier full"]),
        ("full", 43, []),
    ],
)
def test_tier_runs_those_below_and_counts_the_rest(
    suite: pytest.Pytester, tier: str, passed: int, left: list[str]
) -> None:
    result = run(suite, "--tier", tier)
    result.assert_outcomes(passed=passed, skipped=1, deselected=43 - passed)
    assert [line for line in result.outlines if line.startswith("left out")] == left


@pytest.mark.parametrize(
    ("option", "passed", "more", "says"),
    [
        ("warn_after_s=0.2", 3, {"warnings": 1}, "*PytestWarning: took * s in the default tier*"),
        ("fail_after_s=0.2", 2, {"failed": 1}, "*test_slept took * (limit 0.2 s)"),
    ],
)
def test_slow_default_test_warns_or_fails(
    suite: pytest.Pytester, option: str, passed: int, more: dict[str, int], says: str
) -> None:
    # The slow test may take as long.
    result = run(suite, "--tier", "slow", "-o", option)
    result.assert_outcomes(passed=passed, skipped=1, deselected=40, **more)
    result.stdout.fnmatch_lines(says)
