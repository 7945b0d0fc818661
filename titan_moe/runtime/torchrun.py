"""Start one machine's ranks with torchrun, wait for them, and say in a line how they ended."""

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_moe.runtime.child import Child
from titan_moe.runtime.command_lines import training_command
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.failure import explain, print_errors
from titan_moe.runtime.launch import LAUNCHER, count_gpus, cpu_threads
from titan_moe.runtime.stopping import BEGAN, FOLDER, STOPPED, has_stopped

# No mapping of its own for any size, no end of the heap handed back; no lists of small pieces that
# are not joined with their neighbours.
_KEEP_AND_JOIN = ":".join(
    f"glibc.malloc.{name}"
    for name in ("mmap_max=0", f"trim_threshold={2**62}", "tcache_count=0", "mxfast=0")
)
# One machine's connections. torchrun's second store, for its ranks, listens on all interfaces too,
# and is not wanted: `process._store` is a file.
_LOOPBACK = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "NCCL_SOCKET_IFNAME": "lo",
}
STOPPED_FILE = "TITAN_MOE_STOPPED"
"""The variable that names a file to make when a run has stopped, saved, before its last step: a
cluster's command that starts the nodes may end with another code than theirs."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, and this one among them."""

    number: int = 1
    this: int = 0
    """Number 0 hosts the meeting point."""
    endpoint: str = ""
    """host:port of machine 0, where all meet; "" where there is one machine."""
    max_restarts: int = 0
    """How often all ranks start again after one has failed."""


def start_ranks(
    words: Sequence[str],
    *,
    ranks: int,
    nodes: Nodes,
    folder: Path,
    stop_timeout_s: int | None,
    has_saved: Callable[[], bool] = lambda: False,
    environment: Mapping[str, str],
) -> int:
    """Run a command on `ranks` processes of this machine; returns the exit code of the run.

    Args:
        words: of the command and its arguments, after titan-moe.
        folder: the run's. torchrun's command, its own words and every rank's warnings go to its
            launch/.
        stop_timeout_s: how long ranks that are asked to stop may take to save; None where they
            cannot save.
        has_saved: whether the run's folder holds a checkpoint.

    Raises RunError where nothing can be written there.
    """
    with tempfile.TemporaryDirectory() as name:
        records = Path(name)
        torchrun = _torchrun(ranks, nodes, records, environment)
        command = [*torchrun, "-m", "titan_moe", *words]
        log = _new_log(folder, nodes.this, command)
        print(f"starting {ranks} rank(s) with torchrun, log {log}", flush=True)
        variables = {
            # torchrun would set one thread per rank.
            "OMP_NUM_THREADS": str(cpu_threads(ranks)),
            **allocators(environment),
            **(_LOOPBACK if nodes.number == 1 else {}),
            "PYTHONFAULTHANDLER": "1",  # A crash leaves its Python stack in the log.
            **environment,
            FOLDER: name,
            BEGAN: str(time.monotonic()),
            LAUNCHER: str(os.getpid()),
        }
        child = Child(records, stop_timeout_s)
        code = child.run(command, log, variables)
        if sys.stdout.isatty() and (code or child.interrupted):
            print()  # A progress bar may be on the line.
        if code == 0 and has_stopped(records):
            if environment.get(STOPPED_FILE):
                Path(environment[STOPPED_FILE]).touch()
            return STOPPED
        if child.interrupted:
            if words[0] == "train":
                saved = None if stop_timeout_s is None else has_saved()
                print(_goes_on(folder, ranks, nodes, environment, saved=saved))
            print(f"the files of this run are in {folder}")
            return child.interrupted
        if code:
            lines, code = explain(records, log, nodes.endpoint)
            print_errors(lines)
    return code


def _goes_on(
    folder: Path, ranks: int, nodes: Nodes, environment: Mapping[str, str], *, saved: bool | None
) -> str:
    """`saved`: whether there is a checkpoint; None for a run without any."""
    if saved is None:
        return "interrupted, all steps lost: SIGTERM saves with checkpoint.enable and no load_only"
    lost, goes = "the steps since the last save are lost", "goes on from there"
    if not saved:
        lost, goes = "all steps are lost", "begins again"
    words = f"interrupted; {lost} (one SIGTERM asks to save first); the same command {goes}"
    if nodes.number > 1 or not (folder / "config.toml").exists():
        return words
    return f"{words}, and so does\n  {training_command(folder, ranks, environment)}"


def _torchrun(ranks: int, nodes: Nodes, records: Path, environment: Mapping[str, str]) -> list[str]:
    program = Path(sys.executable).with_name("torchrun")
    torchrun = [str(program)]
    if not program.is_file():
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--nproc-per-node", str(ranks)]
    if nodes.max_restarts:
        torchrun += ["--max-restarts", str(nodes.max_restarts)]
    if nodes.number == 1:
        # In a file: --standalone would listen on all interfaces. The file grows with each sign of
        # life, every 5 s by default, which one machine does not need.
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(records / "meeting")]
        return [*torchrun, *meeting, "--rdzv-conf", "store_type=file,keep_alive_interval=3600"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", nodes.endpoint]
    name = ["--rdzv-id", environment.get("SLURM_JOB_ID", "titan_moe")]
    host = ["--rdzv-conf", f"is_host={int(nodes.this == 0)}"]
    return [*torchrun, "--nnodes", str(nodes.number), *meeting, *name, *host]


def allocators(environment: Mapping[str, str]) -> dict[str, str]:
    """How a rank's memory is managed, where the environment does not say so.

    On a GPU segments that grow: exchanges whose sizes change at every step fragment fixed ones, and
    a run then ends out of memory beside free memory. On the CPU glibc keeps what a step has freed
    for the next one, and joins all of it: by default it hands large tensors back to the kernel,
    which clears every page again (half of the time of an elementwise pass), and keeps the odd ends
    that alignment leaves between tensors, so that no other tensor of the size fits in their place.
    """
    found = {}
    if not environment.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        found["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    chosen = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in environment)
    if not (chosen or count_gpus(environment)):
        found["GLIBC_TUNABLES"] = _KEEP_AND_JOIN
    return found


def _new_log(folder: Path, node: int, command: list[str]) -> Path:
    log = folder / "launch" / time.strftime(f"%Y%m%d-%H%M%S-node{node}-{os.getpid()}.log")
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"{shlex.join(command)}\n")
    except OSError as error:
        told = f"cannot write to job.dump_folder={folder}: {error.strerror}"
        raise RunError(told) from None
    return log
