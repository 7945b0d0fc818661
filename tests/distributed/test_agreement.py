"""Waiting for another rank's files."""

import errno
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from titan_moe.comm.process import BACKEND_GRACE_S, set_timeouts
from titan_moe.config.errors import ConfigError
from titan_moe.distributed.agreement import on_every_rank, on_rank_zero
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.ranks import RankError, run_on_ranks


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


def lookup_of_no_key(everywhere: bool) -> tuple[str, bool, str]:
    def wrong() -> None:
        if dist.get_rank() == (1 if everywhere else 0):
            raise KeyError("weight")

    run = on_every_rank if everywhere else on_rank_zero
    with pytest.raises(Exception, match="cannot save x") as caught:
        run(wrong, doing="cannot save x")
    return f"{caught.value}", isinstance(caught.value, RunError), repr(caught.value.__cause__)


@pytest.mark.parametrize("everywhere", [True, False])
def test_an_error_of_the_program_is_not_the_users(everywhere: bool):
    found = run_on_ranks(partial(lookup_of_no_key, everywhere), 2)
    lines, mendable, causes = zip(*found, strict=True)
    assert lines == ("cannot save x: KeyError: 'weight'",) * 2 and not any(mendable)
    # The rank that failed shows where.
    assert causes.index("KeyError('weight')") == everywhere and "None" in causes


def words_of_input(error: Exception) -> str:
    def wrong() -> None:
        raise error

    with pytest.raises(RunError) as caught:
        on_every_rank(wrong, doing="cannot read x")
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError(["a", "b"]), "a; b"),
        (RunError("x is damaged"), "x is damaged"),
        (MemoryError("too much"), "cannot read x: MemoryError: too much"),
        (
            OSError(errno.ENOSPC, "No space left on device", "x/y"),
            "cannot read x: No space left on device (x/y); free some space, or move files by "
            "job.dump_folder, checkpoint.folder, HF_HOME, HF_DATASETS_CACHE or TMPDIR, and start "
            "the same command again",
        ),
    ],
)
def test_what_a_user_can_mend_keeps_its_line(error: Exception, line: str):
    assert run_on_ranks(partial(words_of_input, error), 1) == [line]


def test_the_limit_of_training_does_not_rule_waits_for_files():
    assert run_on_ranks(slow_files, 2) == [("written", "read")] * 2
    with pytest.raises(RankError, match=r"[Tt]imed out|timeout"):
        run_on_ranks(slow_sum, 2)
