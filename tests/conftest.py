"""The tiers of the suite, and how long a test may take.

A test without a mark is of the default tier; `slow` and `full` come on top of it. scripts/test.sh
has the commands; pytest alone runs everything that it is given.
"""

import os
import warnings
from collections.abc import Iterator

import pytest

from tests.support.tiers import in_slice
from titan_moe.runtime.process_pool import PRELOAD, TIMEOUT_S

# Threads that wait for a core another process has spin: a tiny model takes 20 times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
PRELOAD.append("tests.support.preloaded")
_TIERS = ("default", "slow", "full")
_SPENT_S = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=_TIERS, default="full", help="the highest tier to run")
    group.addoption("--slice", type=int, metavar="NUMBER", help="adds a slice of tiers above")
    parser.addini("slow_slices", "a slice of tier slow is one test in so many", default="1")
    parser.addini("full_slices", "a slice of tier full is one test in so many", default="1")
    parser.addini("warn_after_s", "seconds after which a default test draws a warning", default="0")
    parser.addini("fail_after_s", "seconds after which a default test fails", default="0")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Later than the ranks' own limit, which says more.
    if getattr(config.option, "timeout", 0) is None:
        config.option.timeout = TIMEOUT_S + 30


def tier_of(item: pytest.Item) -> str:
    return next((tier for tier in ("full", "slow") if item.get_closest_marker(tier)), "default")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier, number = config.option.tier, config.option.slice
    slices = {each: int(config.getini(f"{each}_slices")) for each in _TIERS[1:]}
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        theirs = tier_of(item)
        chosen = _TIERS.index(theirs) <= _TIERS.index(tier) or (
            number is not None and in_slice(number, item.nodeid, slices[theirs])
        )
        (kept if chosen else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    """A default test that takes long draws a warning or fails, what it set up included. Beside
    other load a second counts less."""
    report = yield
    others = os.getloadavg()[0] / (2 * (os.cpu_count() or 1))  # The suite itself keeps all cores.
    seconds = call.duration / max(1.0, others)
    spent = item.stash[_SPENT_S] = item.stash.get(_SPENT_S, 0.0) + seconds
    # The first use of a kernel on a GPU compiles it, minutes for some.
    limited = tier_of(item) == "default" and item.path.parent.name != "gpu"
    if report.when == "call" and report.passed and limited:
        warn, fail = (float(item.config.getini(f"{what}_after_s")) for what in ("warn", "fail"))
        line = f"took {spent:.1f} s in the default tier: make it cheaper, or mark it slow or full"
        if fail and spent > fail:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} {line} (limit {fail:g} s)"
        elif warn and spent > warn:
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # The test itself may make errors of warnings.
                item.warn(pytest.PytestWarning(line))
    return report
