"""Resident memory of processes, from /proc. No torch: it would be in what is measured."""

from contextlib import suppress
from pathlib import Path

_KEYS = ("VmRSS", "VmHWM")


def resident_mib(pid: int) -> dict[str, float]:
    """MiB of a process: VmRSS now, VmHWM at its highest."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key: int(lines[key].split()[0]) / 1024 for key in _KEYS}


def ranks_memory(launcher: int) -> list[dict[str, float]]:
    """resident_mib of each process that `launcher` has started and that still runs."""
    found = []
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for pid in (task / "children").read_text(encoding="utf-8").split():
            # Between the two looks it may have gone, or be a zombie, which has no memory.
            with suppress(FileNotFoundError, ProcessLookupError, KeyError):
                found.append(resident_mib(int(pid)))
    return found
