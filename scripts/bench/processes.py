"""Reads the use of memory and processor by a job's processes from /proc; Linux only."""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MARK = "TITAN_MOE_SOAK"
"""The variable whose value names a job; its processes inherit it, also those that lose their
parent."""
_PROC = Path("/proc")


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
    for process in _PROC.iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):  # It has ended since, or is another user's.
            state, parent, *rest = (process / "stat").read_text().rpartition(")")[2].split()
            if state == "Z":  # Has no variables.
                zombies.append(parent)
            elif f"{MARK}={mark}" in (variables := _words(process / "environ")):
                parts[process.name] = part = _part(_words(process / "cmdline"), variables)
                found[part] += _usage(process, ticks=int(rest[9]) + int(rest[10]))
    for parent in zombies:
        if parent in parts:
            found[parts[parent]] += Usage(0.0, 0, 0, 0.0)
    return dict(found)


def _part(command: list[str], variables: list[str]) -> str:
    ranks = [each.removeprefix("RANK=") for each in variables if each.startswith("RANK=")]
    if not ranks:
        return "launcher"
    # Only a rank's reader is a process that Python's multiprocessing spawned.
    if "--multiprocessing-fork" in command:
        return f"reader {ranks[0]}"
    return f"rank {ranks[0]}" if "titan_moe" in command else "other"


def _usage(process: Path, ticks: int) -> Usage:
    memory = dict(_fields(process / "smaps_rollup"))
    threads = dict(_fields(process / "status"))["Threads"]
    kib = memory["Pss_Anon"] + memory["Pss_Shmem"] + memory["SwapPss"]
    handles = len(os.listdir(process / "fd"))
    return Usage(kib / 1024, handles, threads, ticks / os.sysconf("SC_CLK_TCK"))


def _fields(path: Path) -> Iterator[tuple[str, int]]:
    """Lines such as `Pss:   295 kB`."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.split() and value.split()[0].isdigit():
            yield name, int(value.split()[0])


def _words(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="replace").split("\0")
