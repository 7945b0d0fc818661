"""Ranks as processes that wait for each other."""

import os
import signal
from collections.abc import Callable

from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.lockstep import AbandonedError, Meeting, Peers, Report, run_ranks

_WORLD = (0, 1, 2)


def _exchange_twice(rank: int, peers: Peers) -> None:
    peers.report(peers.exchange(Meeting("a", _WORLD), rank))
    if rank != 1:
        peers.report(peers.exchange(Meeting("b", (0, 2)), 10 * rank))


def _one_leaves_it_out(rank: int, peers: Peers) -> None:
    try:
        if rank != 1:
            peers.exchange(Meeting("a", _WORLD), rank)
        peers.report("went through")
    except AbandonedError:
        peers.report("abandoned")


def _one_fails_and_one_dies(rank: int, peers: Peers) -> None:
    if rank == 0:
        raise ValueError("of rank 0")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        peers.exchange(Meeting("a", _WORLD), rank)
    except AbandonedError:
        peers.report("abandoned")


def _reports(fn: Callable[[int, Peers], None]) -> list[Report]:
    return list(run_ranks(fn, len(_WORLD)))


def _ran(fn: Callable[[int, Peers], None]) -> list[Report]:
    ((_, reports),) = in_fresh_processes(_reports, [(fn,)], num_workers=1)
    return reports


def test_members_get_each_other_s_values() -> None:
    reports = _ran(_exchange_twice)
    said = sorted((r.rank, r.value) for r in reports if not r.has_ended)
    assert said == [(0, [0, 1, 2]), (0, [0, 20]), (1, [0, 1, 2]), (2, [0, 1, 2]), (2, [0, 20])]
    assert sorted(r.rank for r in reports if r.has_ended) == [0, 1, 2]
    assert not any(r.error for r in reports)


def test_ranks_that_wait_in_vain_are_abandoned() -> None:
    said = {r.rank: r.value for r in _ran(_one_leaves_it_out) if not r.has_ended}
    assert said == {0: "abandoned", 1: "went through", 2: "abandoned"}


def test_failed_and_dead_ranks_end_with_their_reason() -> None:
    errors = {r.rank: r.error for r in _ran(_one_fails_and_one_dies) if r.has_ended}
    assert "ValueError: of rank 0" in errors[0] and errors[1] == "its process has died"
    assert not errors[2]
