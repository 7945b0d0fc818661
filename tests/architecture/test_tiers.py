"""Tiers leave out what they say, a slice is the same for the same seed, slow default tests fail."""

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
def test_a_tier_runs_those_below_and_counts_what_it_leaves_out(
    suite: pytest.Pytester, tier: str, passed: int, left: list[str]
) -> None:
    result = run(suite, "--tier", tier)
    result.assert_outcomes(passed=passed, skipped=1, deselected=43 - passed)
    assert [line for line in result.outlines if line.startswith("left out")] == left
    result.stdout.fnmatch_lines("SKIPPED * no such device")


def test_a_slice_adds_the_same_tests_for_the_same_seed(suite: pytest.Pytester) -> None:
    def chosen(seed: str) -> set[str]:
        result = run(suite, "--tier", "default", "--slice", seed, "-v")
        found = {line.split()[0] for line in result.outlines if "test_full[" in line}
        result.stdout.fnmatch_lines(f"slice {seed}: {len(found)} of 40 tests of tier full*")
        return found

    first = chosen("abc")
    assert 0 < len(first) < 40 and chosen("abc") == first != chosen("abd")


@pytest.mark.parametrize(
    ("option", "passed", "more", "says"),
    [
        ("warn_after_s=0.2", 3, {"warnings": 1}, "*PytestWarning: took * s in the default tier*"),
        ("fail_after_s=0.2", 2, {"failed": 1}, "*test_slept took * (limit 0.2 s)"),
    ],
)
def test_a_default_test_that_takes_long_is_told_or_fails(
    suite: pytest.Pytester, option: str, passed: int, more: dict[str, int], says: str
) -> None:
    # The slow test may take as long.
    result = run(suite, "--tier", "slow", "-o", option)
    result.assert_outcomes(passed=passed, skipped=1, deselected=40, **more)
    result.stdout.fnmatch_lines(says)
