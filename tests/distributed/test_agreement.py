"""Waiting for another rank's files."""

import time

import pytest
import torch
import torch.distributed as dist

from titan_moe.distributed.agreement import on_every_rank, on_rank_zero
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


def test_the_limit_of_training_does_not_rule_waits_for_files():
    assert run_on_ranks(slow_files, 2) == [("written", "read")] * 2
    with pytest.raises(RankError, match=r"[Tt]imed out|timeout"):
        run_on_ranks(slow_sum, 2)
