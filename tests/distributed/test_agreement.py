"""Waiting for another rank's files."""

import errno
import time

import pytest
import torch
import torch.distributed as dist

from titan_moe.distributed.agreement import on_every_rank, on_rank_zero
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.process import BACKEND_GRACE_S, set_timeouts
from titan_moe.testing.ranks import RankError, run_on_ranks


def slow_files() -> tuple[str, str]:
    set_timeouts(1 - BACKEND_GRACE_S, [None])

    def slow(seconds: int, word: str) -> str:
        time.sleep(seconds)
        return word

    written = on_every_rank(lambda: slow(2 * dist.get_rank(), "written"), doing="write")
    read = on_rank_zero(lambda: slow(2, "read"), doing="read")
    set_timeouts(60, [None])
    return written, read


def slow_sum() -> None:
    set_timeouts(1 - BACKEND_GRACE_S, [None])
    time.sleep(2 * dist.get_rank())
    dist.all_reduce(torch.zeros(1))


def write_to_a_full_disk() -> str:
    with pytest.raises(RunError) as error:
        on_every_rank(_raise_on_rank_one, doing="cannot save x")
    return str(error.value)


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise OSError(errno.ENOSPC, "No space left on device", "x/y")


def test_a_disk_error_comes_with_its_remedy():
    line = (
        "cannot save x: No space left on device (x/y); free some space and start the same command "
        "again"
    )
    assert run_on_ranks(write_to_a_full_disk, 2) == [line] * 2


def test_the_limit_of_training_does_not_rule_waits_for_files():
    assert run_on_ranks(slow_files, 2) == [("written", "read")] * 2
    with pytest.raises(RankError, match=r"[Tt]imed out|timeout"):
        run_on_ranks(slow_sum, 2)
