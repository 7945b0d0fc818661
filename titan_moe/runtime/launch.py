"""What the launcher told this process, and how the process ends.

No torch here: this is needed before anything heavy is imported.
"""

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from itertools import takewhile
from pathlib import Path

LAUNCHER = "TITAN_MOE_LAUNCHER"
"""The variable that tells ranks the process above their torchrun."""


@dataclass(frozen=True)
class Launch:
    """This process's place among those of the run; the defaults are a run of one process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Launch":
        """Read torchrun's variables; without them this is the only process."""
        if "RANK" not in environment:
            return cls()
        world_size = int(environment["WORLD_SIZE"])
        local_world_size = int(environment["LOCAL_WORLD_SIZE"])
        return cls(
            rank=int(environment["RANK"]),
            world_size=world_size,
            local_rank=int(environment["LOCAL_RANK"]),
            local_world_size=local_world_size,
            node_rank=int(environment["GROUP_RANK"]),
            num_nodes=world_size // local_world_size,
        )


def attempt_number(environment: Mapping[str, str]) -> int:
    """How often torchrun has started all ranks again before."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def count_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """CUDA GPUs that a run would use, found without torch; 0 with a CPU build of torch."""
    if metadata.version("torch").endswith("+cpu"):
        return 0
    found = len(list(devices.glob("nvidia[0-9]*")))
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return found
    names = environment["CUDA_VISIBLE_DEVICES"].split(",")
    # CUDA reads up to the first name that is no device; -1 is how users say none.
    visible = list(takewhile(lambda name: name.strip() not in ("", "-1"), names))
    return min(found, len(visible))


def has_bfloat16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bfloat16 itself, found without torch; True where nothing tells."""
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        return True
    # "flags" is what x86 calls the list, "Features" ARM.
    known = {"flags", "Features"} & words
    return not known or bool({"avx512_bf16", "amx_bf16", "bf16"} & words)


def default_ranks(environment: Mapping[str, str]) -> int:
    """Ranks of a node where none are asked for: the GPUs found, else two processes."""
    return count_gpus(environment) or 2


def cpu_threads(local_world_size: int) -> int:
    """Threads for each of `local_world_size` processes that share the cores given to this one."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def run_as_command(words: str) -> None:
    """Run `titan-moe WORDS` with this process's arguments, for a module started by python -m."""
    sys.argv[1:1] = words.split()
    runpy.run_module("titan_moe", run_name="__main__", alter_sys=True)


def end_on_signals() -> None:
    """Let SIGINT and SIGTERM end this process at once.

    A rank blocked in a collective never returns to Python to run a handler, and nothing needs one:
    checkpoints are complete or invisible.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ignores_hangups() -> bool:
    """Whether nohup has started this process: a terminal that closes is then not to end it."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def end_with_parent() -> None:
    """Let the kernel end this process when its parent dies, however it dies: a rank with torchrun,
    torchrun with its launcher. No orphan holds a GPU."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def has_lost_launcher(environment: Mapping[str, str]) -> bool:
    """Whether the launcher of this rank, or torchrun between the two, ended before
    `end_with_parent` was called: the kernel tells nothing of earlier deaths."""
    if LAUNCHER not in environment or sys.platform != "linux":
        return False
    launcher, process = int(environment[LAUNCHER]), os.getppid()
    while process not in (0, launcher):
        process = _parent(process)
    return process != launcher


def _parent(pid: int) -> int:
    """0 where there is none, or no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # The name, in brackets, may hold anything.
