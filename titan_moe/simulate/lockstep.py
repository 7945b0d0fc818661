"""All ranks of a world as processes of this machine, which wait for each other only where one has
to know what the others have sent.

The processes are forked from this one, so that what it has imported and learnt is shared. Values
pass through it, and turns to compute: when all wait for others that have ended, or that wait
elsewhere, nothing can come any more, and each is told so.
"""

import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple


class AbandonedError(Exception):
    """Raised in a rank if the values that it waits for can no longer come."""


class Meeting(NamedTuple):
    """Identifies one exchange of values by its key and its members' ranks."""

    key: Hashable
    members: tuple[int, ...]


class Peers:
    """The other ranks, for one of them."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def exchange(self, meeting: Meeting, value: Any) -> list[Any]:
        """The values of all members, in their order; waits for them.

        Raises AbandonedError when a member never comes.
        """
        self._pipe.send((meeting, value))
        values = self._pipe.recv()
        if values is None:
            raise AbandonedError
        return values

    def report(self, value: Any) -> None:
        """Hand something to the process that started the ranks, without waiting."""
        self._pipe.send((None, value))


class Report(NamedTuple):
    """Holds a value that a running rank reports, or how the rank ended."""

    rank: int
    value: Any
    error: str = ""
    """Traceback of a rank that failed, or "its process has died"; else empty."""
    has_ended: bool = False


def run_ranks(
    fn: Callable[[int, Peers], None], world_size: int, *, num_workers: int | None = None
) -> Generator[Report, None, None]:
    """Call `fn(rank, peers)` for every rank, each in a process forked from this one, and yield what
    they report and how they end, as it comes.

    Call it in a process that has one thread. Ranks end by themselves when this process has gone.
    `num_workers`: how many compute at a time; left out, as many as there are cores.
    """
    schedule = _Schedule(num_workers or os.cpu_count() or 1)
    try:
        for rank in range(world_size):
            schedule.fork(fn, rank)
        while schedule.ranks:
            schedule.give_turns()
            for pipe in wait(list(schedule.ranks)):
                report = schedule.hear(pipe)  # type: ignore[arg-type]
                if report is not None:
                    yield report
    finally:
        schedule.close()


@dataclass
class _Schedule:
    """The ranks that have not ended: which compute, which may go on, and which wait for others."""

    num_workers: int
    ranks: dict[Connection, int] = field(default_factory=dict)
    processes: list[int] = field(default_factory=list)
    running: set[Connection] = field(default_factory=set)
    ready: deque[tuple[Connection, bytes]] = field(default_factory=deque)
    """With what each is told, as a pipe sends it."""
    waiting: dict[Meeting, dict[int, tuple[Connection, Any]]] = field(default_factory=dict)

    def fork(self, fn: Callable[[int, Peers], None], rank: int) -> None:
        ours, theirs = Pipe()
        process = os.fork()
        if process == 0:
            # A pipe ends when its last holder has gone, so no rank holds another one's.
            for other in (ours, *self.ranks):
                other.close()
            _run(fn, rank, theirs)
        theirs.close()
        self.processes.append(process)
        self.ranks[ours] = rank
        self.ready.append((ours, _packed(None)))

    def give_turns(self) -> None:
        """Let as many compute as may."""
        if not self.running and not self.ready:  # Nothing comes any more.
            for meeting in list(self.waiting):
                self._answer(meeting, None)
        while self.ready and len(self.running) < self.num_workers:
            pipe, told = self.ready.popleft()
            if pipe in self.ranks:
                self.running.add(pipe)
                with suppress(BrokenPipeError):  # It has died; its end is heard next.
                    pipe.send_bytes(told)

    def hear(self, pipe: Connection) -> Report | None:
        rank = self.ranks[pipe]
        try:
            what, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            return self._ended(pipe, Report(rank, None, "its process has died", has_ended=True))
        if isinstance(what, Meeting):
            self.running.discard(pipe)
            self._meet(what, rank, pipe, value)
            return None
        if what is None:
            return Report(rank, value)
        return self._ended(pipe, Report(rank, None, value, has_ended=True))

    def close(self) -> None:
        for pipe in self.ranks:
            pipe.close()
        for process in self.processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)

    def _ended(self, pipe: Connection, report: Report) -> Report:
        del self.ranks[pipe]
        self.running.discard(pipe)
        pipe.close()
        return report

    def _meet(self, meeting: Meeting, rank: int, pipe: Connection, value: Any) -> None:
        there = self.waiting.setdefault(meeting, {})
        there[rank] = pipe, value
        if len(there) == len(meeting.members):
            self._answer(meeting, [there[member][1] for member in meeting.members])

    def _answer(self, meeting: Meeting, values: Sequence[Any] | None) -> None:
        told = _packed(values)  # Once for all of them.
        self.ready += [(pipe, told) for pipe, _ in self.waiting.pop(meeting).values()]


def _packed(value: Any) -> bytes:
    """Pickles a value as `Connection.send` does, so that `Connection.recv` can read it."""
    return bytes(ForkingPickler.dumps(value))


def _run(fn: Callable[[int, Peers], None], rank: int, pipe: Connection) -> None:
    """Call it and end this process, without what its parent would do at its own end."""
    error = ""
    try:
        pipe.recv()  # Its first turn.
        fn(rank, Peers(pipe))
    except BaseException:
        error = traceback.format_exc()
    with suppress(BrokenPipeError):
        pipe.send(("end", error))
    os._exit(0)
