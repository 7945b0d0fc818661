"""A leak is found, in samples and in a real run; what does not grow is flat."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.bench import soak as script
from scripts.bench.processes import MARK, usage_of_job
from scripts.bench.slopes import FLAT, GROWS, UNCLEAR, Slope, slope
from tests.support.paths import REPO

STEPS, INTERVAL = 2000, 20


def _record(**per_save: float) -> dict:
    """As of a run in which each save leaves something behind, and a tenth of the samples meets a
    save that is under way."""
    noise = random.Random(0)
    samples, lines = [], []
    for step in range(0, STEPS, 4):
        saves = step // INTERVAL
        left = {name: number * saves for name, number in per_save.items()}
        burst = noise.random() < 0.1
        rank = [
            300 + noise.gauss(0, 0.3) + 20 * burst + left.get("mib", 0),
            40 + burst + left.get("handles", 0),
            12 + left.get("threads", 0),
            0.05 * step * (1 + left.get("dearer", 0)) + noise.gauss(0, 0.01),
            1 + left.get("processes", 0),
        ]
        samples.append(
            {
                "seconds": 10 + step / 20,
                "logged": max(1, step - step % INTERVAL),
                "usage": {"launcher": [90.0, 20, 3, 1.0, 2], "rank 0": rank},
                "files": 40 + 5 * burst + left.get("files", 0),
                "shm": 3,
                "load": 2.0,
            }
        )
    for step in (1, *range(INTERVAL, STEPS + 1, INTERVAL)):
        slower = 1 + per_save.get("slower", 0) * step / INTERVAL
        busy = noise.choice([1, 1, 1, 1, 3])
        lines.append(
            {
                "step": step,
                "time/step": slower * busy * noise.gauss(1, 0.01),
                "time/checkpoint": noise.gauss(0.01, 0.001),
                "time/validation": noise.gauss(0.1, 0.01),
            }
        )
    return {"steps": STEPS, "interval": INTERVAL, "samples": samples, "lines": lines}


@pytest.mark.parametrize(
    ("per_save", "row"),
    [
        ({}, None),
        ({"mib": 0.05}, "memory, rank 0"),
        ({"handles": 1}, "open files"),
        ({"threads": 1}, "threads"),
        ({"processes": 0.1}, "processes"),
        ({"files": 0.2}, "files of the run"),
        ({"slower": 0.001}, "a step"),
        ({"dearer": 0.002}, "processor, rank 0"),
    ],
    ids=str,
)
def test_what_each_save_leaves_behind_is_found(per_save: dict[str, float], row: str) -> None:
    verdicts = {each.name: each.verdict for each in script.judge(_record(**per_save))}
    assert len(verdicts) == 11
    assert verdicts == {name: GROWS if name == row else FLAT for name in verdicts}


def test_the_slope_and_its_interval() -> None:
    steps = [10.0 * n for n in range(100)]
    exact = slope("x", "", 1.0, steps, [5 + step / 500 for step in steps])
    assert exact[4:7] == pytest.approx((2.0, 2.0, 2.0)) and exact.verdict == GROWS
    noise = random.Random(1)
    held = 0
    for _ in range(200):
        values = [step / 500 + noise.gauss(0, 1) for step in steps]
        found = slope("x", "", 1.0, steps, values)
        held += found.low <= 2 <= found.high
    assert 180 <= held <= 199, "of 200 intervals, about 95 in 100 hold the slope"


@pytest.mark.parametrize(
    ("low", "per_1000", "high", "verdict"),
    [(-3, -2, -1, FLAT), (0, 0, 1, FLAT), (0.1, 1.5, 2, GROWS), (-1, 0.5, 2, UNCLEAR)],
)
def test_flat_is_shown_and_not_assumed(
    low: float, per_1000: float, high: float, verdict: str
) -> None:
    assert Slope("x", "", 0, 0, per_1000, low, high, 1.0).verdict == verdict


_CHILD = """
import os, sys, threading, time
kept = [open(os.devnull) for _ in range(int(sys.argv[2]))]
for _ in range(2):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
os.posix_spawn("/bin/true", ["true"], os.environ)  # Ends, and is not waited for.
memory = bytearray(os.urandom(1 << 20) * 64)
print("ready", flush=True)
time.sleep(60)
"""


def test_processes_are_counted_from_outside() -> None:
    found = []
    for number in (0, 5):
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, "titan_moe", str(number)],
            env=os.environ | {MARK: f"test-{os.getpid()}", "RANK": "1"},
            stdout=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            time.sleep(0.1)
            found.append(usage_of_job(f"test-{os.getpid()}"))
        finally:
            process.kill()
            process.communicate()
    fewer, more = (each["rank 1"] for each in found)
    assert more.handles == fewer.handles + 5 and more.threads == 3 and more.processes == 2
    assert 64 < more.mib < 200
    assert usage_of_job(f"test-{os.getpid()}") == {}


def test_a_job_that_ends_while_it_is_looked_at_is_not_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage_of_job(mark: str) -> dict:
        (tmp_path / "metrics.jsonl").write_text('{"step": 80}\n')
        return {}

    (tmp_path / "metrics.jsonl").write_text('{"step": 78}\n')
    monkeypatch.setattr(script, "usage_of_job", usage_of_job)
    with script.Watch(tmp_path, "mark", seconds=0.001) as watch:
        while not watch.samples:
            time.sleep(0.001)
    assert watch.samples[0]["logged"] == 80


_LEAK = """
import os, threading
_fsync, _kept = os.fsync, []
def fsync(handle):
    _kept.append(bytearray(b"x" * 100_000))
    os.dup(handle)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    _fsync(handle)
os.fsync = fsync
"""


@pytest.mark.slow
def test_a_real_run_that_leaks_is_found(tmp_path: Path) -> None:
    """A list grows, a file stays open and a thread is never joined at each file that is saved."""
    (tmp_path / "sitecustomize.py").write_text(_LEAK)
    record = script.soak(
        tmp_path / "run",
        steps=80,
        ranks=2,
        interval=2,
        seconds=0.1,
        environment={"PYTHONPATH": f"{tmp_path}:{REPO}"},
    )
    rows = {row.name: row for row in script.judge(record)}
    wanted = {"memory, rank 0", "memory, rank 1", "open files", "threads"}
    assert {name for name, row in rows.items() if row.verdict == GROWS} >= wanted
    for name in ("processes", "files of the run"):  # Few samples may not show that it is flat.
        assert rows[name].verdict != GROWS
    assert record["left"] == []


def test_a_quantity_with_nan_is_not_flat() -> None:
    values = [1.0] * 240
    values[3:9] = [float("nan")] * 6
    assert slope("x", "", 1.0, range(240), values).verdict == UNCLEAR
