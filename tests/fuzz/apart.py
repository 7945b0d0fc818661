"""One trial in a process of its own: it cannot take the campaign down, nor memory, nor time."""

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_RESIDENT_GIB = 2
_VIRTUAL_GIB = 16
"""Beyond what the process has already when the trial begins. Libraries reserve much that they never
touch; the second is what keeps the machine alive, the first is what is judged."""


class Outcome(NamedTuple):
    """How a trial ended."""

    kind: str
    """read: the program took what it was given; refused: it said in clear lines why not; failed:
    anything else."""
    said: str


def run_apart(action: Callable[[Path], Outcome], *, seconds: float = 60) -> Outcome:
    """The outcome of `action`, in a forked process with limits on its time and memory.

    The action gets a folder to write to, which is gone afterwards.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = folder / "outcome.json"
        child = os.fork()
        if not child:
            _be_the_child(action, folder, result)
        before = _bytes_now(1) // 2**10  # What it was forked with.
        ended = _wait(child, seconds)
        if ended is None:
            return Outcome("failed", f"did not end within {seconds:.0f} s")
        status, kib = ended
        if (more := (kib - before) / 2**20) > _RESIDENT_GIB:
            return Outcome("failed", f"took {more:.1f} GiB of memory")
        if os.WIFSIGNALED(status):
            return Outcome("failed", f"killed by {signal.Signals(os.WTERMSIG(status)).name}")
        if not result.exists():
            return Outcome("failed", f"ended by itself with exit code {os.WEXITSTATUS(status)}")
        return Outcome(*json.loads(result.read_text()))


def _bytes_now(field: int) -> int:
    """Bytes of this process: 0, of its addresses; 1, resident."""
    pages = Path("/proc/self/statm").read_text().split()[field]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _be_the_child(action: Callable[[Path], Outcome], folder: Path, result: Path) -> None:
    own = folder / "own"
    own.mkdir()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_bytes_now(0) + _VIRTUAL_GIB * 2**30,) * 2)
        with (folder / "output").open("w") as output:
            os.dup2(output.fileno(), sys.stdout.fileno())
            os.dup2(output.fileno(), sys.stderr.fileno())
            outcome = action(own)
    except BaseException:
        outcome = Outcome("failed", traceback.format_exc())
    with contextlib.suppress(BaseException):
        result.write_text(json.dumps(outcome))
    os._exit(0)


def _wait(child: int, seconds: float) -> tuple[int, int] | None:
    """The child's status and its largest resident set in KiB; None where it had to be killed for
    its time."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        _, status, usage = os.wait4(child, 0)
        return status, usage.ru_maxrss
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
