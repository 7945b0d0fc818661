"""Trainings of several ranks as jobs of their own: started, looked up, killed, waited for."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import REPO

TINY: dict[str, object] = {
    "model.name": "deepseek_v3",
    "model.flavor": "2M",
    "training.dataset": "synthetic",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.mixed_precision_param": "float32",
    "metrics.log_freq": 1,
}
"""Keys of a training whose steps take milliseconds."""
_MARKER = f"TITAN_MOE_TRIAL={os.getpid()}-"
"""A variable that all programs of a job have, with the job's number behind it."""


class Found(NamedTuple):
    """A process that lives."""

    pid: int
    parent: int
    command: str


class Job:
    """One start of a command of titan-moe; `folder` gets its output and its temporary files."""

    _started = 0

    def __init__(self, folder: Path, *words: object) -> None:
        Job._started += 1
        self._marker = f"{_MARKER}{Job._started};"
        self._output = folder / "output"
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        variables = dict([self._marker.split("=")]) | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}",
        }
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "titan_moe", *map(str, words)],
                env=os.environ | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Returns the exit code, once the job has ended."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Returns the exit code; None if the job has not ended in time."""
        until(lambda: self.poll() is not None, seconds)
        return self.poll()

    def gone(self, seconds: float) -> bool:
        """Waits until no process of the job lives."""
        return until(lambda: self.poll() is not None and not self.alive(), seconds)

    def alive(self) -> list[Found]:
        return alive(self._marker)

    def kill(self, victim: str, number: int) -> bool:
        """Sends SIGKILL to the "launcher", "torchrun", a "rank", or all of the "job".

        Returns whether there was one.
        """
        if victim == "job":
            return end_all(self._marker)
        found = self.alive()
        launcher = self._process.pid
        torchruns = [x.pid for x in found if x.parent == launcher]
        pids = {
            "launcher": [x.pid for x in found if x.pid == launcher],
            "torchrun": torchruns,
            "rank": sorted(x.pid for x in found if x.parent in torchruns),
        }[victim]
        return bool(pids) and _kill(pids[number % len(pids)])

    def error_lines(self) -> list[str]:
        """Returns what a user was told of how the run failed."""
        lines = self._output.read_text(errors="replace").splitlines()
        return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]

    def words(self) -> str:
        """Returns the end of what the job printed."""
        return self._output.read_text(errors="replace")[-1500:]


def train(folder: Path, ranks: int, keys: Mapping[str, object]) -> Job:
    """Starts a training."""
    return Job(folder, "train", "--ranks", ranks, *(f"--{k}={v}" for k, v in keys.items()))


def alive(marker: str = _MARKER) -> list[Found]:
    """Finds the processes of a job, or of all jobs of this campaign."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        process = Path("/proc", name)
        try:
            if marker.encode() not in (process / "environ").read_bytes():
                continue
            command = (process / "cmdline").read_text(errors="replace")
            # The name of the program, in brackets, may hold anything.
            state, parent, *_ = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # It has ended since, or is another user's.
            continue
        if state not in "ZX":
            found.append(Found(int(name), int(parent), command))
    return found


def end_all(marker: str = _MARKER) -> bool:
    """Kills the processes of a job, or of all jobs, until none starts another."""
    killed = 0
    while found := alive(marker):
        killed += sum([_kill(each.pid) for each in found])
    return killed > 0


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits for a condition; returns whether it came true in time."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return False
        time.sleep(0.05)
    return True


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
