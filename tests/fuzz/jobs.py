"""Trainings of several ranks as jobs of their own: started, looked up, killed, waited for.

A job is started as a user does it, by run_train.sh. Or its ranks are forked from this process,
which has imported what they need: they run what torchrun's ranks run, with its variables, and the
process above them ends all when one has failed, as torchrun does. That saves most of a small run.
"""

import os
import shutil
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.figure  # noqa: F401  With the next one: imported once, not by every rank.
import torch
import torch._dynamo
import torch.distributed as dist

from titan_moe.runtime.launch import end_with_parent
from titan_moe.runtime.stopping import BEGAN, FOLDER
from titan_moe.runtime.torchrun import explain
from titan_moe.train import main

_REPO = Path(__file__).resolve().parents[2]
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
_MARKER = "TITAN_MOE_TRIAL"
"""A variable that all programs of a job have."""


class Found(NamedTuple):
    """A process that lives."""

    pid: int
    parent: int
    session: int
    command: str


class Job:
    """One start of a training.

    Args:
        arguments: of titan-moe train.
        work: a folder for the job's own files; its output is in `output`.
        by_command: by run_train.sh.
    """

    def __init__(
        self, arguments: Sequence[str], ranks: int, work: Path, output: Path, *, by_command: bool
    ) -> None:
        self._by_command = by_command
        self._output = output
        self._marker = f"{_MARKER}={uuid.uuid4().hex}"
        self._records = work / "records"
        self._code: int | None = None
        # What an earlier start has left there is not this one's.
        shutil.rmtree(self._records, ignore_errors=True)
        for folder in (self._records, work / "tmp"):
            folder.mkdir(parents=True, exist_ok=True)
        variables = dict([self._marker.split("=")]) | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(work / "tmp"),
        }
        if by_command:
            variables |= {"NGPU": str(ranks), "CONFIG_FILE": str(_empty(work))}
            variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            self.pid = self._fork(lambda: _run_command(arguments, variables))
        else:
            variables |= {FOLDER: str(self._records), BEGAN: str(time.monotonic())}
            self.pid = self._fork(lambda: _be_launcher(arguments, ranks, variables))

    def poll(self) -> int | None:
        """The exit code, once the job has ended."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, seconds: float) -> int | None:
        """The exit code; None where it has not ended."""
        _until(lambda: self.poll() is not None, seconds)
        return self._code

    def gone(self, seconds: float) -> float | None:
        """Seconds until no process of the job lives; None where one still does."""
        return _until(lambda: self.poll() is not None and not self.alive(), seconds)

    def alive(self) -> list[Found]:
        """Its processes."""
        found = [_look(int(name)) for name in os.listdir("/proc") if name.isdigit()]
        return [each for each in found if each is not None and self._has(each)]

    def kill(self, victim: str, number: int) -> bool:
        """SIGKILL to the "launcher", to "torchrun", to a "rank", or
        to all of the "job"; returns whether there was one."""
        if victim == "job":
            killed = 0
            while found := self.alive():  # Again: one may have started another meanwhile.
                killed += sum([_kill(each.pid) for each in found])
                self.poll()
            return killed > 0
        pids = self._pids()[victim]
        return bool(pids) and _kill(pids[number % len(pids)])

    def error_lines(self) -> list[str]:
        """What a user was told of how the run failed."""
        if self._by_command:
            lines = self._output.read_text(errors="replace").splitlines()
            return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return explain(self._records, self._output, "")[0]

    def words(self) -> str:
        """The last that it printed."""
        return self._output.read_text(errors="replace")[-1500:]

    def _pids(self) -> dict[str, list[int]]:
        alive = self.alive()
        above = {self.pid}
        if self._by_command:
            children = [each for each in alive if each.parent == self.pid]
            above = {each.pid for each in children if "torchrun" in each.command}
        ranks = sorted(each.pid for each in alive if each.parent in above)
        launchers = [each.pid for each in alive if each.pid == self.pid]
        return {
            "launcher": launchers,
            "torchrun": sorted(above) if self._by_command else [],
            "rank": ranks,
        }

    def _has(self, process: Found) -> bool:
        if process.session == self.pid:
            return True
        try:
            return self._marker.encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            return False

    def _fork(self, action: Callable[[], None]) -> int:
        with self._output.open("ab") as output:
            pid = os.fork()
            if not pid:
                try:
                    os.setsid()
                    end_with_parent()
                    os.dup2(output.fileno(), sys.stdout.fileno())
                    os.dup2(output.fileno(), sys.stderr.fileno())
                    action()
                except BaseException:
                    traceback.print_exc()
                os._exit(1)
        return pid


def _empty(work: Path) -> Path:
    """A configuration without keys."""
    path = work / "empty.toml"
    path.touch()
    return path


def _run_command(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    program = str(_REPO / "run_train.sh")
    os.execve(program, [program, *arguments], os.environ | variables)


def _be_launcher(arguments: Sequence[str], ranks: int, variables: dict[str, str]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
    }
    running = {_fork_rank(rank, arguments, variables) for rank in range(ranks)}
    first = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code if code > 0 else 128 - code
            for other in running:
                os.kill(other, signal.SIGTERM)
    os._exit(first)


def _fork_rank(rank: int, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    pid = os.fork()
    if not pid:
        try:
            end_with_parent()
            os.environ.update(variables)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            torch.set_num_threads(1)
            os._exit(main(list(arguments), os.environ))
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _until(condition: Callable[[], bool], seconds: float) -> float | None:
    """How long it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(0.05)
    return time.monotonic() - began


def _look(pid: int) -> Found | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return None
    # The name, in brackets, may hold anything.
    state, parent, _, session, *_ = stat.rpartition(")")[2].split()
    return None if state in "ZX" else Found(pid, int(parent), int(session), command)
