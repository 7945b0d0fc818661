"""`titan-moe simulate collectives`: clean where the program is, and each planted mistake is found,
under the routing that shows it and on the group that it parts."""

import pytest

from tests.support import planting
from tests.support.tiers import tiered
from titan_moe.config.parse import load_job
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.collectives import WorldReport, run_world, smallest_task
from titan_moe.simulate.routings import ROUTINGS

_SMALL = ("--training.loss_chunk_size", "0", "--training.local_batch_size", "1")
_EP = "--parallelism.expert_parallel_"
_SYMMETRIC = [f"{_EP}degree", "4", f"{_EP}comm_backend", "symmetric"]
_STEPS = ["start", *(routing.name for routing in ROUTINGS)]
# Runs of one process share what torch learns in the first.
_DEFAULT = ["a rank without tokens leaves an exchange out", "a rank sums in another type"]


DESYNCS = planting.planted_desyncs()


def run_with(names: list[str]) -> list[WorldReport]:
    """Returns what is found with each of these mistakes."""
    reports = []
    for name in names:
        bug = DESYNCS[name]
        function, _ = planting.right_source(bug)
        right = function.__code__
        planting.plant(bug)
        reports.append(run_layout(bug.ranks, bug.family, bug.options))
        function.__code__ = right
    return reports


def run_layout(ranks: int, family: str, options: list[str]) -> WorldReport:
    job = load_job(["--job.config_file", f"debug/gate_{family}", *_SMALL, *options])
    return run_world(smallest_task(job, ranks, seq_len=32))


@pytest.mark.slow
def test_run_without_a_mistake_is_clean() -> None:
    task = (4, "qwen3", _SYMMETRIC)
    ((_, report),) = in_fresh_processes(run_layout, [task], num_workers=1)
    assert not report.findings and not report.errors
    assert report.trials == _STEPS
    assert report.collectives > 400


@pytest.mark.parametrize(
    "names",
    tiered([_DEFAULT], slow=[[name for name in DESYNCS if name not in _DEFAULT]]),
    ids=["some", "others"],
)
def test_mistakes_are_found_under_the_routing_that_shows_them(names: list[str]) -> None:
    ((_, reports),) = in_fresh_processes(run_with, [(names,)], num_workers=1)
    for name, report in zip(names, reports, strict=True):
        bug = DESYNCS[name]
        place = _STEPS.index(bug.trial)
        # A step in which ranks wait for whole numbers in vain is not completed.
        assert report.trials in (_STEPS[:place], _STEPS[: place + 1]), (name, report)
        trial, finding = report.findings[0]
        assert trial == bug.trial and bug.group in finding.group, (name, trial, finding)
        assert all(words in finding.text for words in bug.says), (name, finding)
