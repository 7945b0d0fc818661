"""Start one machine's ranks with torchrun, pass signals on, and say in a line how the run ended.

torchrun 2.13 can forward signals itself (--signals-to-handle, --shutdown-timeout), but then ends
with 1 whatever its ranks ended with, and other nodes wait 300 s for it. So a request to stop is a
file that ranks see, and all torchruns end well. @record keeps whole seconds, which cannot tell the
first failure from those that follow, so ranks leave records of their own (`errors.report`).
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from titan_moe.runtime.errors import RunError, explain, print_errors
from titan_moe.runtime.launch import count_gpus, cpu_threads, end_with_parent
from titan_moe.runtime.stopping import FOLDER, STOPPED, has_stopped, request_stop

EXIT_CODES = {signal.SIGINT: 130, signal.SIGHUP: 143, signal.SIGTERM: 143, signal.SIGUSR1: 143}
STOPPED_FILE = "TITAN_MOE_STOPPED"
"""The variable that names a file. A run that stopped before its last step, saved, makes the file: a
cluster's command that starts the nodes may hide their exit code."""
# A signal may come twice: to all processes of a job, and from the command that started them.
_SAME_SIGNAL_S = 1.0
# Exchanges whose sizes change at every step fragment segments that do not grow, and a run then ends
# out of memory beside free memory.
_GROWING = "expandable_segments:True"
# One machine's connections. torchrun's second store, for its ranks, listens on all interfaces too,
# and is not wanted: `process._store` is a file.
_LOOPBACK = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "NCCL_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, and this one among them."""

    number: int = 1
    this: int = 0
    """Number 0 hosts the meeting point."""
    endpoint: str = ""
    """host:port of machine 0, where all meet; "" for one machine."""
    max_restarts: int = 0
    """The number of restarts of all ranks after one has failed."""


def start_ranks(
    words: Sequence[str],
    *,
    ranks: int,
    nodes: Nodes,
    folder: Path,
    stop_timeout_s: int | None,
    environment: Mapping[str, str],
) -> int:
    """Run a command on `ranks` processes of this machine; returns the exit code of the run.

    Args:
        words: the command and its arguments, after titan-moe.
        folder: the run's folder. Its launch/ gets torchrun's command and output, and every rank's
            warnings.
        stop_timeout_s: seconds that ranks have to save after a request to stop; None if they
            cannot save.

    Raises:
        RunError: the folder cannot be written.
    """
    with tempfile.TemporaryDirectory() as name:
        records = Path(name)
        command = [*_torchrun(ranks, nodes, records, environment), "-m", "titan_moe", *words]
        began = time.strftime("%Y%m%d-%H%M%S")
        log = folder / "launch" / f"{began}-node{nodes.this}-{os.getpid()}.log"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"{shlex.join(command)}\n")
        except OSError as error:
            line = f"cannot write to job.dump_folder={folder}: {error.strerror}"
            raise RunError(line) from None
        print(f"starting {ranks} rank(s) with torchrun, log {log}", flush=True)
        variables = {
            "OMP_NUM_THREADS": str(cpu_threads(ranks)),  # torchrun would set 1.
            # Each rank's compiler would start as many workers as the machine has cores, at most 32.
            "TORCHINDUCTOR_COMPILE_THREADS": str(cpu_threads(ranks)),
            "PYTORCH_ALLOC_CONF": environment.get("PYTORCH_CUDA_ALLOC_CONF", _GROWING),
            **(_LOOPBACK if nodes.number == 1 else {}),
            "PYTHONFAULTHANDLER": "1",  # A crash leaves its Python stack in the log.
            # torchrun reads a missing option from PET_*, which Kubernetes' operators set for a pod.
            **{name: environment[name] for name in environment if not name.startswith("PET_")},
            FOLDER: name,
        }
        torchrun = _Torchrun(records, stop_timeout_s)
        code = torchrun.run(command, log, variables)
        if code == 0 and has_stopped(records):
            if environment.get(STOPPED_FILE):
                Path(environment[STOPPED_FILE]).touch()
            return STOPPED
        if torchrun.interrupted:
            lost = "nothing was saved: with checkpoint.enable=true one SIGTERM saves first"
            if stop_timeout_s is not None:
                lost = "the same command goes on from the last checkpoint (one SIGTERM saves first)"
            print(f"interrupted; {lost}\nthe files of this run are in {folder}")
            return torchrun.interrupted
        if code:
            lines, code = explain(records, log, nodes.endpoint)
            print_errors(lines)
    return code


class _Torchrun:
    """The torchrun process, and the answers to signals that reach its launcher.

    If the run can save, SIGTERM and SIGUSR1 leave a request for its ranks and do nothing else. A
    second SIGTERM, the end of the time to save, or any other signal ends the run as it is.
    """

    def __init__(self, records: Path, stop_timeout_s: int | None) -> None:
        self.interrupted = 0
        """The launcher's exit code if a signal ended the run; else 0."""
        self._records = records
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._terminated: float | None = None

    def run(self, command: list[str], log: Path, variables: Mapping[str, str]) -> int:
        """Start torchrun, wait for it, and return its exit code.

        torchrun runs in a session of its own, and gets no signal but those from here. It ends with
        this process, also if that is killed.
        """
        for number in EXIT_CODES:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # By nohup.
                signal.signal(number, self._answer)
        signal.signal(signal.SIGALRM, self._give_up)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=variables,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(_begin, os.getpid()),
            )
            if self.interrupted:
                self._process.terminate()
            code = self._process.wait()
        signal.alarm(0)
        for number in EXIT_CODES:  # Too late for any.
            signal.signal(number, signal.SIG_IGN)
        return code

    def _answer(self, number: int, frame: Any) -> None:
        asks = number == signal.SIGUSR1 or (number == signal.SIGTERM and not self._is_second())
        if self._stop_timeout_s is None or not asks:
            return self._end(EXIT_CODES[signal.Signals(number)])
        if request_stop(self._records):
            signal.alarm(self._stop_timeout_s)
            _say("asked to stop: the state is saved after this step (SIGTERM: end without)")

    def _give_up(self, number: int, frame: Any) -> None:
        _say(f"not saved within training.stop_timeout_seconds={self._stop_timeout_s}")
        self._end(EXIT_CODES[signal.SIGTERM])

    def _is_second(self) -> bool:
        now = time.monotonic()
        if self._terminated is None:
            self._terminated = now
        return now - self._terminated > _SAME_SIGNAL_S

    def _end(self, code: int) -> None:
        self.interrupted = self.interrupted or code
        if self._process is not None:
            self._process.terminate()


def _begin(launcher: int) -> None:
    """Prepare the process that becomes torchrun. Some clusters send SIGUSR1 to all processes of a
    job, and torchrun would die of it."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    end_with_parent()
    if os.getppid() != launcher:  # It has been killed just now.
        os._exit(1)


def _say(line: str) -> None:
    """Print from a signal handler, which may have interrupted a print."""
    with suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


def _torchrun(ranks: int, nodes: Nodes, records: Path, environment: Mapping[str, str]) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    if can_bind(ranks, environment):
        torchrun += ["--numa-binding", "node"]
    if nodes.max_restarts:
        torchrun += ["--max-restarts", str(nodes.max_restarts)]
    if nodes.number == 1:
        # Nodes meet in a file: --standalone would listen on all interfaces. The file grows with
        # each sign of life, every 5 s by default, which one machine does not need.
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(records / "meeting")]
        return [*torchrun, *meeting, "--rdzv-conf", "store_type=file,keep_alive_interval=3600"]
    job, is_host = environment.get("SLURM_JOB_ID", "titan_moe"), f"is_host={int(nodes.this == 0)}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", nodes.endpoint, "--rdzv-id", job]
    return [*torchrun, "--nnodes", str(nodes.number), *meeting, "--rdzv-conf", is_host]


def can_bind(ranks: int, environment: Mapping[str, str]) -> bool:
    """Returns whether torchrun can bind each rank to the CPUs of its GPU's NUMA node.

    torchrun does so by numactl. It ends, or its ranks do, where that is missing or may not bind, as
    in some containers, and where this process may use no CPU of a node.
    """
    cpus, numactl = os.sched_getaffinity(0), shutil.which("numactl", path=environment.get("PATH"))
    if numactl is None or ranks > count_gpus(environment) or len(cpus) != os.cpu_count():
        return False
    return not subprocess.call([numactl, f"-C{min(cpus)}", "true"], stderr=subprocess.DEVNULL)
