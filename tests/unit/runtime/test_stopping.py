"""When a rank asks all to stop: its launcher's request, and the run's time."""

import time
from pathlib import Path

import pytest

from titan_moe import train
from titan_moe.runtime.launch import Launch
from titan_moe.runtime.stopping import StopWatch, has_stopped, request_stop


def test_the_first_rank_of_a_node_reads_the_request_and_answers(tmp_path: Path) -> None:
    environment = {"TITAN_MOE_FAILURES": str(tmp_path), "TORCHELASTIC_RESTART_COUNT": "2"}
    first, second = (
        StopWatch(0, Launch(rank=4 + rank, local_rank=rank), environment) for rank in range(2)
    )
    assert not first.asks() and not second.asks()
    request_stop(tmp_path)
    assert first.asks() and not second.asks()
    second.answer()
    assert not has_stopped(tmp_path)
    first.answer()
    assert has_stopped(tmp_path)
    StopWatch(0, Launch(), environment | {"TORCHELASTIC_RESTART_COUNT": "10"})
    assert not has_stopped(tmp_path), "the next attempt has not"


@pytest.mark.parametrize(("stopped", "alone", "rank"), [(True, 75, 0), (False, 0, 0)])
def test_torchrun_takes_a_stop_for_a_good_end(
    stopped: bool, alone: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_run", lambda *all: stopped)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert train.main([], {}) == alone
    assert train.main([], place | {"GROUP_RANK": "0"}) == rank


def test_without_a_launcher_nothing_is_read_or_written() -> None:
    watch = StopWatch(0, Launch(), {})
    assert not watch.asks()
    watch.answer()


# A step asks 1 s before its end, saves take 5 s. The run began at second 100, and this attempt at
# second 110. It stops at the last step after which another one and a save would be too late.
@pytest.mark.parametrize(
    ("step_s", "max_seconds", "last_step"),
    [
        ([3] * 50, 60, 13),  # 53 s + 3 s + 5 s are more; saved at 59.
        ([3, 9, *[3] * 50], 60, 9),  # As long as the longest one may be.
        ([3] * 50, 5, 1),
    ],
)
def test_a_run_stops_before_its_time_is_up(
    step_s: list[int], max_seconds: int, last_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 110.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = StopWatch(max_seconds, Launch(), {"TITAN_MOE_BEGAN": "100"})
    assert not StopWatch(max_seconds, Launch(rank=1), {"TITAN_MOE_BEGAN": "100"}).asks()
    for step, seconds in enumerate(step_s, 1):
        now += seconds - 1
        stop = watch.asks()
        now += 1
        if stop or step == 2:
            with watch.saving():
                now += 5
        if stop:
            break
    assert step == last_step and (now <= 100 + max_seconds or step == 1)
