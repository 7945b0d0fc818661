"""Reads the use of memory and processor by a job's processes; Linux only. No torch: it would be in
what is measured."""

from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

MARK = "TITAN_MOE_SOAK"
"""The variable whose value names a job; its processes inherit it, also those that lose their
parent."""


class Usage(NamedTuple):
    """Resources used by one process, or by several together."""

    mib: float
    """Memory without pages of files, such as libraries, which other programs share and the kernel
    takes back. Memory that n processes share counts 1/n for each."""
    handles: int
    threads: int
    processor_s: float
    """Processor time so far."""
    processes: int = 1

    def __add__(self, other: tuple) -> "Usage":  # type: ignore[override]
        return Usage(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def usage_of_job(mark: str) -> dict[str, Usage]:
    """Returns the usage by part of a job: "launcher", "rank 0", "reader 0", "other"."""
    found: dict[str, Usage] = defaultdict(lambda: Usage(0.0, 0, 0, 0.0, 0))
    parts, zombies = {}, []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # It has ended since, or is another user's.
            if process.status() == psutil.STATUS_ZOMBIE:  # Has no variables.
                zombies.append(process.ppid())
            elif (variables := process.environ()).get(MARK) == mark:
                parts[process.pid] = part = _part(process.cmdline(), variables.get("RANK"))
                found[part] += _usage(process)
    for parent in zombies:
        if parent in parts:
            found[parts[parent]] += Usage(0.0, 0, 0, 0.0)
    return dict(found)


def _part(command: list[str], rank: str | None) -> str:
    if rank is None:
        return "launcher"
    # Only a rank's reader is a process that Python's multiprocessing spawned.
    if "--multiprocessing-fork" in command:
        return f"reader {rank}"
    return f"rank {rank}" if "titan_moe" in command else "other"


def _usage(process: psutil.Process) -> Usage:
    memory = _mib(f"/proc/{process.pid}/smaps_rollup")
    mib = memory["Pss_Anon"] + memory["Pss_Shmem"] + memory["SwapPss"]
    times = process.cpu_times()
    return Usage(mib, process.num_fds(), process.num_threads(), times.user + times.system)


def resident_mib(pid: int) -> dict[str, float]:
    """Returns MiB of a process: VmRSS now, VmHWM at its highest, and others."""
    return _mib(f"/proc/{pid}/status")


def ranks_memory(launcher: int) -> list[dict[str, float]]:
    """Returns `resident_mib` of each process that `launcher` has started and that still runs."""
    found = []
    for child in psutil.Process(launcher).children():
        with suppress(OSError):  # It has gone between the two looks.
            found.append(resident_mib(child.pid))
    return [each for each in found if "VmRSS" in each]  # A zombie has no memory.


def _mib(file: str) -> dict[str, float]:
    """Returns the values of lines such as `Pss:   295 kB`."""
    lines = (line.split() for line in Path(file).read_text(encoding="utf-8").splitlines())
    return {words[0][:-1]: int(words[1]) / 1024 for words in lines if words[-1:] == ["kB"]}
