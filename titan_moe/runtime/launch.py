"""A process's place in the run, its machine's devices, and how the process ends.

Nothing here imports torch: it is needed before anything heavy is imported.
"""

import ctypes
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path


@dataclass(frozen=True)
class Launch:
    """This process's place among those of the run; the defaults are a run of one process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Launch":
        """Read torchrun's variables; without them this is the only process."""
        if not is_rank(environment):
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(environment[name]) for name in names))


def is_rank(environment: Mapping[str, str]) -> bool:
    """Returns whether torchrun has started this process. Operators of Kubernetes set RANK and
    WORLD_SIZE too, but for a pod."""
    return "LOCAL_WORLD_SIZE" in environment


def number_ranges(numbers: Iterable[int]) -> str:
    """Returns numbers as text such as "0-3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Returns ranks as text such as "ranks 0-3, 7"."""
    return f"rank{'s' * (len(ranks) > 1)} {number_ranges(ranks)}"


def attempt_number(environment: Mapping[str, str]) -> int:
    """Returns how often torchrun has started all ranks again."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def count_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Returns the number of NVIDIA GPUs that a run would use, also of those that torch cannot use:
    `device.refuse_unusable` refuses them."""
    found = len(list(devices.glob("nvidia[0-9]*")))
    if not found and (tool := shutil.which("nvidia-smi", path=environment.get("PATH"))):
        # Some have none of these files, such as WSL 2.
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
        found = len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE))
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return found
    names = environment["CUDA_VISIBLE_DEVICES"].split(",")
    # CUDA reads up to the first name that is no device; -1 is how users say none.
    visible = list(takewhile(lambda name: name.strip() not in ("", "-1"), names))
    return min(found, len(visible))


def has_bfloat16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether the CPU multiplies bfloat16 itself; True if the system does not say."""
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        return True
    # "flags" is what x86 calls the list, "Features" ARM.
    known = {"flags", "Features"} & words
    return not known or bool({"avx512_bf16", "amx_bf16", "bf16"} & words)


def default_ranks(environment: Mapping[str, str]) -> int:
    """Returns the default number of ranks of a node: its GPUs, or two processes."""
    return count_gpus(environment) or 2


def cpu_threads(local_world_size: int) -> int:
    """Returns the threads of each of `local_world_size` processes that share these cores."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def run_as_command(words: str) -> None:
    """Run `titan-moe WORDS` with this process's arguments, for a module started by python -m."""
    sys.argv[1:1] = words.split()
    runpy.run_module("titan_moe", run_name="__main__", alter_sys=True)


def titan_moe_command() -> list[str]:
    """Returns the words that start titan-moe in this shell: the environment that run_train.sh makes
    may not be the active one."""
    beside = Path(sys.executable).with_name("titan-moe")
    if shutil.which("titan-moe") == str(beside):
        return ["titan-moe"]
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", "titan_moe"]


def end_on_signals() -> None:
    """Let SIGINT and SIGTERM end this process at once.

    A rank blocked in a collective never returns to Python to run a handler, and nothing needs one:
    checkpoints are complete or invisible.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_with_parent() -> None:
    """Let the kernel end this process when its parent dies, however it dies: a rank with torchrun,
    torchrun with its launcher. No orphan holds a GPU."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
