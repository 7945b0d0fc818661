"""Ranks that fail: the error names the cause, whichever rank reports first, and no wait hangs."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from titan_moe.runtime import ranks
from titan_moe.runtime.process_pool import WorkerError, in_fresh_processes
from titan_moe.runtime.ranks import RankError, run_on_ranks


def rank_times(factor: int) -> int:
    return dist.get_rank() * factor


def test_run_on_ranks_returns_results_in_rank_order() -> None:
    assert run_on_ranks(rank_times, 3, 10) == [0, 10, 20]


def fail_while_others_wait(bad_rank: int, how: str) -> None:
    """All but one rank wait in a collective, which says only that the connection closed."""
    if dist.get_rank() == bad_rank:
        time.sleep(0.2)
        if how == "raises":
            # Its traceback comes after the others have noticed.
            dist.destroy_process_group()
            time.sleep(0.5)
            raise ValueError("the cause")
        if how == "exits":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "ValueError: the cause"),
        ("exits", "ended without a result (exit code 3)"),
        ("is killed", "was killed by SIGKILL without a result (exit code -9)"),
    ],
)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_rank_error_names_the_cause_first(bad_rank: int, how: str, says: str) -> None:
    with pytest.raises(RankError) as failure:
        run_on_ranks(fail_while_others_wait, 2, bad_rank, how)
    told = str(failure.value)
    assert told.startswith(f"rank {bad_rank}:") and says in told


def test_rank_error_shows_consequences_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "Traceback\nRuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer"
    ends = [(0, None, broken), (1, None, "Traceback\nValueError: the cause")]
    monkeypatch.setattr(ranks, "outcomes", lambda *_, **__: (end for end in ends))
    with pytest.raises(RankError) as failure:
        run_on_ranks(rank_times, 2, 10)
    told = str(failure.value).splitlines()
    assert told[:3] == ["rank 1:", "Traceback", "ValueError: the cause"]
    assert told[3:] == [f"rank 0: {broken.splitlines()[1]}"]


def hang(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        time.sleep(600)


@pytest.mark.slow
def test_run_on_ranks_times_out_with_stacks() -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as failure:
        run_on_ranks(hang, 2, 1, timeout_s=10)
    # Rank 0 says where it waited; rank 1 says nothing.
    assert str(failure.value).startswith("ranks:\n[1] had not ended after 10 s\n")
    assert "dist.barrier()" in str(failure.value)
    assert time.monotonic() - start < 60


def number(n: int) -> int:
    if n == 1:
        os._exit(7)
    return n


def test_in_fresh_processes_names_the_exit_code_of_a_dead_process() -> None:
    with pytest.raises(WorkerError, match=r"number 1:\n.*ended without a result \(exit code 7\)"):
        list(in_fresh_processes(number, [(0,), (1,)], num_workers=1))
