"""When a rank asks all to stop: its launcher's request, and the run's time."""

import argparse
import sys
import time
from pathlib import Path

import pytest

from titan_moe import train
from titan_moe.cli.train import COMMAND
from titan_moe.runtime.launch import Launch
from titan_moe.runtime.stopping import StopWatch, all_attempts, has_stopped, request_stop


def test_first_rank_of_a_node_reads_the_request_and_answers(tmp_path: Path) -> None:
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


def test_attempt_that_dies_in_its_imports_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its failure would be told in the words of the attempt before it."""
    (tmp_path / "attempt-0").mkdir()
    for name, value in (
        ("RANK", "0"),
        ("TITAN_MOE_FAILURES", str(tmp_path)),
        ("TORCHELASTIC_RESTART_COUNT", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "titan_moe.train", None)
    with pytest.raises(ImportError):
        COMMAND.run(argparse.Namespace())
    assert all_attempts(tmp_path)[-1].name == "attempt-1"


@pytest.mark.parametrize(("stopped", "alone", "rank"), [(True, 75, 0), (False, 0, 0)])
def test_stopped_rank_ends_with_0_under_torchrun(
    stopped: bool, alone: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_run", lambda *all: stopped)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert train.main([], {}) == alone
    assert train.main([], place | {"GROUP_RANK": "0"}) == rank


def test_stop_watch_without_a_launcher() -> None:
    watch = StopWatch(0, Launch(), {})
    assert not watch.asks()
    watch.answer()


class _Run:
    """A run on a clock that starts at second 110; its launcher began at second 100. A step asks 2 s
    before its end; every fourth step saves, which takes 5 s, in the background or not."""

    def __init__(self, *, in_background: bool) -> None:
        self.now, self.longest_save = 110.0, 0.0
        self._in_background = in_background
        self._saving_since: float | None = None

    def pending(self, step: int) -> bool:
        return self._saving_since is not None or step % 4 == 0

    def train(self, watch: StopWatch, step_s: list[int]) -> None:
        for step, seconds in enumerate(step_s, 1):
            self.now += seconds - 2
            stop = watch.asks()
            self.now += 2
            with watch.saving(self, step):
                if self._saving_since is not None and self.now - self._saving_since >= 5:
                    self._wait()
                if step % 4 == 0:
                    self._save()
            if stop:
                self._wait()
                if step % 4:
                    self._save()
                    self._wait()
                return
        raise AssertionError("it ran to its end")

    def _save(self) -> None:
        self._wait()
        self._saving_since = self.now
        if not self._in_background:
            self._wait()

    def _wait(self) -> None:
        if self._saving_since is not None:
            self.now = max(self.now, self._saving_since + 5)
            self.longest_save = max(self.longest_save, self.now - self._saving_since)
            self._saving_since = None


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("step_s", [[3] * 99, [3, 9, *[3] * 99], [2, 4] * 99])
def test_run_stops_before_max_seconds(
    step_s: list[int], in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for max_seconds in range(60, 100):
        run = _Run(in_background=in_background)
        monkeypatch.setattr(time, "monotonic", lambda run=run: run.now)
        run.train(StopWatch(max_seconds, Launch(), {"TITAN_MOE_BEGAN": "100"}), step_s)
        left = 100 + max_seconds - run.now
        saves = 2 if in_background else 1
        assert 0 <= left <= 2 * max(step_s) + saves * 5, "each may be as long as the longest"


def test_first_node_alone_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 105.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watches = [StopWatch(5, Launch(rank=rank), {"TITAN_MOE_BEGAN": "100"}) for rank in range(2)]
    assert [watch.asks() for watch in watches] == [True, False]
