"""Which rank failed first, and why: records written by the ranks, read after torchrun has ended.

torchrun itself ends with exit code 1 under a page of its own whatever a rank ended with. So each
failing rank leaves a record in a folder handed to it, of which `explain` names the first. A rank
that could leave none (SIGKILL, a segmentation fault) is found on torchrun's page.
"""

import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_moe.runtime.stopping import all_attempts

_RANK = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*(-?\d+)")
_PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_GUESSES: dict[int, str] = {
    signal.SIGKILL: " (often: out of memory)",
    signal.SIGBUS: " (often: a file was cut short while it was read)",
}
_UNREACHABLE = re.compile(r"Rendezvous(Connection|Timeout|Closed)\w*Error|DistNetworkError")


@dataclass(frozen=True)
class Failure:
    """How one rank ended."""

    time: float
    """Seconds since the epoch."""
    rank: int
    exit_code: int
    lines: list[str]
    expected: bool
    """A mistake that the user can mend, in its own words; else an exception without such a line."""

    def save(self, folder: Path) -> None:
        """Write `rank-R.json` into `folder`, complete or not at all."""
        path = folder / f"rank-{self.rank}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.rename(path)


def explain(records: Path, page: Path, endpoint: str) -> tuple[list[str], int]:
    """The lines to print and the exit code of a run that torchrun reports as failed.

    `records` has a folder for each attempt of torchrun's: the last one counts. `page` is torchrun's
    standard error; `endpoint` is where the nodes were to meet.
    """
    failures = sorted(
        (
            Failure(**json.loads(path.read_text()))
            for attempt in all_attempts(records)[-1:]
            for path in attempt.glob("rank-*.json")
        ),
        key=lambda failure: failure.time,
    )
    first = next((failure for failure in failures if failure.expected), None)
    if first is not None:
        return first.lines, first.exit_code
    text = page.read_text(encoding="utf-8", errors="replace")
    ends = [(int(rank), int(code)) for rank, code in _RANK.findall(text)]
    # torchrun ends the other ranks with SIGTERM; any other end came first.
    ends = [end for end in ends if end[1] != -signal.SIGTERM] or ends
    for rank, code in ends:
        if code < 0:
            return [_killed(rank, -code, page)], 128 - code
    if failures:
        lines = [f"{line} (traceback in {page})" for line in failures[0].lines]
        return lines, failures[0].exit_code
    if ends:
        rank, code = ends[0]
        return [f"rank {rank} ended with exit code {code}; its last words are in {page}"], code
    if _PORT_IN_USE.search(text):
        return [f"the port of RDZV_ENDPOINT={endpoint} is in use: choose another port"], 1
    if _UNREACHABLE.search(text):
        line = f"the nodes could not meet at RDZV_ENDPOINT={endpoint}: see {page} "
        return [f"{line}(docs/troubleshooting.md#the-nodes-could-not-meet)"], 1
    return [f"torchrun ended without naming a rank; its words are in {page}"], 1


def _killed(rank: int, number: int, page: Path) -> str:
    name = signal.Signals(number).name
    guess = _GUESSES.get(number, "")
    return (
        f"rank {rank} was killed by {name}{guess}; torchrun's output is in {page} "
        "(docs/troubleshooting.md#a-rank-was-killed)"
    )


def report(
    rank: int, lines: Sequence[str], exit_code: int, *, expected: bool, to: Path | None
) -> None:
    """Record a failure in the folder `to`; without one, or when it cannot be written, print it."""
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
        print(f"error: {' '.join(line.split())}", file=sys.stderr, flush=True)
