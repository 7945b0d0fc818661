"""The error of a run that a user can mend, remedies for errors of the system, and the record that a
failing rank leaves for its launcher, which prints it."""

import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_moe.runtime.stopping import all_attempts

CRASHED = 70
"""The exit code of an error in titan_moe itself, which prints a traceback."""
# CUDA's errors that a defective device causes are failures of the machine. Its others, such as
# device-side asserts and illegal memory accesses, are the program's.
_OUTSIDE = re.compile(
    r"uncorrectable|\bECC\b|\bXid\b|NVLink|hardware|unknown error|busy or unavailable|"
    r"out of ?memory|allocate memory|NCCL|gloo|Dist\w*Error|connection (closed|reset)",
    re.I,
)
_AGAIN = "and start the same command again"
_MOVES = "job.dump_folder, checkpoint.folder, HF_HOME, HF_DATASETS_CACHE or TMPDIR"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    **dict.fromkeys((*_FULL, errno.EFBIG), f"free some space, or move files by {_MOVES}, {_AGAIN}"),
    errno.EROFS: f"make the file system writable {_AGAIN}",
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"let this user read and write there {_AGAIN}"),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV),
        f"bring the file system back {_AGAIN}",
    ),
}

# torchrun's page about ranks that failed, and its errors about nodes that could not meet.
_RANK = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*(-?\d+)")
_MEETING = {
    "(?i)EADDRINUSE|address already in use": (
        "the port of RDZV_ENDPOINT={endpoint} is in use: choose another port"
    ),
    r"Rendezvous(Connection|Timeout|Closed)\w*Error|DistNetworkError": (
        "the nodes could not meet at RDZV_ENDPOINT={endpoint}: see {log} "
        "(docs/troubleshooting.md#the-nodes-could-not-meet)"
    ),
}
_GUESSES: dict[int, str] = {
    signal.SIGKILL: " (often: out of memory)",
    signal.SIGBUS: " (often: a file was cut short while it was read)",
}


class RunError(Exception):
    """A run cannot start or go on. One line names the cause, the place and the remedy. Exit code
    1."""


def disk_remedy(error: BaseException) -> str:
    """Returns what to do about a file system that cannot be written; "" for all other errors."""
    return _REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""


def with_remedy(line: str, folder: Path | None = None) -> str:
    """Returns a line about an error; where a disk is full, also the folder and a remedy."""
    if any(os.strerror(number) in line for number in _FULL) and _AGAIN not in line:
        return f"{line}{f' (in {folder})' if folder else ''}; {_REMEDIES[errno.ENOSPC]}"
    return line


def listed(names: Sequence[str], most: int = 6) -> str:
    """Returns names in one line: the first ones, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def is_outside(error: BaseException) -> bool:
    """Returns whether memory, a device, a disk, the network or another rank failed, and not the
    program."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, (OSError, MemoryError)) or _OUTSIDE.search(text) is not None


def reason(error: BaseException) -> str:
    """Returns one line on why a file could not be read, without the name of a Python class."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    return " ".join(str(error).split())


@dataclass(frozen=True)
class Failure:
    """Describes how one rank failed."""

    time: float
    """Seconds since the epoch."""
    rank: int
    exit_code: int
    lines: list[str]
    expected: bool
    """True: the lines name a mistake that the user can mend. False: they name an exception."""

    def save(self, folder: Path) -> None:
        """Write `rank-R.json` into `folder`, complete or not at all."""
        path = folder / f"rank-{self.rank}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.rename(path)


def report(
    rank: int, lines: Sequence[str], exit_code: int, *, expected: bool, to: Path | None
) -> None:
    """Record a failure in the folder `to`; print it if there is none or it cannot be written."""
    failure = Failure(time.time(), rank, exit_code, list(lines), expected)
    if to is not None:
        try:
            return failure.save(to)
        except OSError:
            pass
    print_errors(lines)


def print_errors(lines: Sequence[str]) -> None:
    """Print one `error: ` line for each of `lines` on standard error."""
    for line in lines:
        print(f"error: {' '.join(with_remedy(line).split())}", file=sys.stderr, flush=True)


def explain(records: Path, log: Path, endpoint: str) -> tuple[list[str], int]:
    """Returns the lines to print and the exit code of a run that torchrun reports as failed.

    torchrun's own report names a rank that left no record (SIGKILL, a segmentation fault).

    Args:
        records: holds a folder for each attempt of torchrun's; the last one counts.
        log: torchrun's standard error.
        endpoint: where the nodes were to meet.
    """
    attempts = all_attempts(records)[-1:]
    files = [path for attempt in attempts for path in attempt.glob("rank-*.json")]
    failures = [Failure(**json.loads(path.read_text())) for path in files]
    failures.sort(key=lambda failure: (not failure.expected, failure.time))
    if failures and failures[0].expected:
        return failures[0].lines, failures[0].exit_code
    text = log.read_text(encoding="utf-8", errors="replace")
    ends = [(int(rank), int(code)) for rank, code in _RANK.findall(text)]
    # torchrun ends the other ranks with SIGTERM; any other end came first.
    ends = [end for end in ends if end[1] != -signal.SIGTERM] or ends
    for rank, code in ends:
        if code < 0:
            how = f"{signal.Signals(-code).name}{_GUESSES.get(-code, '')}"
            line = f"rank {rank} was killed by {how}; torchrun's output is in {log}"
            return [f"{line} (docs/troubleshooting.md#a-rank-was-killed)"], 128 - code
    if failures:
        lines = [f"{line} (traceback in {log})" for line in failures[0].lines]
        return lines, failures[0].exit_code
    for rank, code in ends:
        return [f"rank {rank} ended with exit code {code}; its output is in {log}"], code
    for pattern, line in _MEETING.items():
        if re.search(pattern, text):
            return [line.format(endpoint=endpoint, log=log)], 1
    last = text.strip().rpartition("\n")[2]
    return [f"torchrun ended without naming a rank ({last}); its output is in {log}"], 1
