"""`titan-moe simulate collectives`: clean where the program is, and each planted mistake is found,
under the routing that shows it and on the group that it parts."""

import pytest

from tests.support.planted_desyncs import DESYNCS, run_with
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.routings import ROUTINGS

_STEPS = ["start", *(routing.name for routing in ROUTINGS)]
# Runs of one process share what torch learns in the first.
_DEFAULT = ["a rank without tokens leaves an exchange out", "a rank sums in another type"]


def _reports(names: list[str]) -> dict:
    ((_, reports),) = in_fresh_processes(run_with, [(names,)], num_workers=1)
    return reports


def _check(names: list[str]) -> None:
    reports = _reports(names)
    for name, report in reports.items():
        if not name:
            assert not report.findings and not report.errors
            assert report.parts == _STEPS
            assert report.collectives > 400
            continue
        bug = DESYNCS[name]
        place = _STEPS.index(bug.part)
        # Where whole numbers are waited for in vain, nothing comes through.
        assert report.parts in (_STEPS[:place], _STEPS[: place + 1]), (name, report)
        part, finding = report.findings[0]
        assert part == bug.part and bug.group in finding.group, (name, part, finding)
        assert all(words in finding.text for words in bug.says), (name, finding)


def test_a_mistake_is_found_under_the_routing_that_shows_it() -> None:
    _check(_DEFAULT)


@pytest.mark.slow
def test_every_planted_mistake_is_found() -> None:
    _check(["", *(name for name in DESYNCS if name not in _DEFAULT)])
