"""Start titan-moe on a tiny model as a user does; look up, kill and wait for its processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.paths import REPO
from tests.support.processes import start_process
from titan_moe.runtime.process_pool import TIMEOUT_S

EMPTY = REPO / "tests" / "support" / "empty.toml"
TINY: Mapping[str, object] = {
    "model.name": "deepseek_v3",
    "model.flavor": "2M",
    "training.dataset": "synthetic",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.steps": 2,
    "training.mixed_precision_param": "float32",
    "lr_scheduler.warmup_steps": 1,
    "metrics.log_freq": 1,
}
"""Keys of a training whose steps take milliseconds."""
_MARKER = f"TITAN_MOE_JOB={os.getpid()}-"
"""A variable that all programs of a job have, with the job's number behind it."""


def command(folder: Path, **overrides: Any) -> list[str]:
    """run_train.sh on a job in `folder`; `table__key=value` overrides its keys."""
    keys = {**TINY, "job.dump_folder": folder}
    keys |= {key.replace("__", ".", 1): value for key, value in overrides.items()}
    return [str(REPO / "run_train.sh"), *(f"--{key}={value}" for key, value in keys.items())]


def run_among(
    programs: Mapping[str, str], folder: Path, *words: object, **variables: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a command that finds these programs in `folder`, by their bash scripts, before all
    others."""
    for name, script in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (folder / name).chmod(0o755)
    return run_to_end(*words, PATH=f"{folder}:{os.environ['PATH']}", **variables)


def run_to_end(
    *words: object, cwd: Path | None = None, seconds: float = TIMEOUT_S, **variables: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a program as a user does, with these variables on top, and within a time."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def environment(**variables: Any) -> dict[str, str]:
    """The environment of a user whose active Python is this one, on the CPU, with the defaults."""
    mine = {name: value for name, value in os.environ.items() if name != "CONFIG_FILE"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    mine |= {"PATH": path, "CONFIG_FILE": str(EMPTY), "CUDA_VISIBLE_DEVICES": "", "NGPU": "1"}
    return mine | {name: str(value) for name, value in variables.items()}


def run_train(
    folder: Path, variables: dict[str, Any] | None = None, **overrides: Any
) -> subprocess.CompletedProcess[str]:
    """Run run_train.sh to its end, within the limit of a test."""
    return run_to_end(*command(folder, **overrides), **variables or {})


class Job:
    """A command that runs in a session of its own.

    `folder` gets its output and its temporary files.
    """

    _started = 0

    def __init__(
        self, folder: Path, command: Sequence[object], variables: Mapping[str, str]
    ) -> None:
        Job._started += 1
        self._marker = f"{_MARKER}{Job._started};"
        self._output = folder / "output"
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        more = dict([self._marker.split("=")]) | {"TMPDIR": str(folder / "tmp")}
        with self._output.open("wb") as output:
            self._process = start_process(
                command,
                env=os.environ | variables | more,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Returns the exit code, once the job has ended."""
        return self._process.poll()

    def wait(self, seconds: float = TIMEOUT_S) -> int | None:
        """Returns the exit code; None if the job has not ended in time."""
        until(lambda: self.poll() is not None, seconds)
        return self.poll()

    def gone(self, seconds: float) -> bool:
        """Waits until no process of the job lives."""
        return until(lambda: self.poll() is not None and not self.pids("job"), seconds)

    def pids(self, kind: str) -> list[int]:
        """Processes of the whole "job", its "launcher", its "torchrun", or its "rank"s in order."""
        parents = _alive(self._marker)
        torchruns = [pid for pid, parent in parents.items() if parent == self.pid]
        return {
            "job": list(parents),
            "launcher": [pid for pid in parents if pid == self.pid],
            "torchrun": torchruns,
            "rank": sorted(pid for pid, parent in parents.items() if parent in torchruns),
        }[kind]

    def kill(self, victim: str, number: int) -> bool:
        """Sends SIGKILL to all of the job, or to one process of a kind. Returns whether it was
        there."""
        if victim == "job":
            return end_all(self._marker)
        pids = self.pids(victim)
        return bool(pids) and _kill(pids[number % len(pids)])

    def error_lines(self) -> list[str]:
        """Returns the reasons that the job gave for its failure."""
        lines = self.output().splitlines()
        return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]

    def output(self) -> str:
        return self._output.read_text(errors="replace")


def end_all(marker: str = _MARKER) -> bool:
    """Kills the processes of a job, or of all jobs, until none starts another."""
    killed = 0
    while found := _alive(marker):
        killed += sum([_kill(pid) for pid in found])
    return killed > 0


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits for a condition; returns whether it came true in time."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return False
        time.sleep(0.05)
    return True


def is_running(pid: int | str) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _alive(marker: str) -> dict[int, int]:
    """The living processes that have a marker, and the parent of each."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        process = Path("/proc", name)
        try:
            if marker.encode() not in (process / "environ").read_bytes():
                continue
            # The name of the program, in brackets, may hold anything.
            state, parent, *_ = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # It has ended since, or is another user's.
            continue
        if state not in "ZX":
            found[int(name)] = int(parent)
    return found


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
