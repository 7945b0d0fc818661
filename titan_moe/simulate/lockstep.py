"""All ranks of a world as processes of this machine, which wait for each other only where one has
to know what the others have sent.

The processes are forked from this one, so that what it has imported and learnt is shared. Values
pass through it. When all wait for others that have ended, or that wait elsewhere, nothing can come
any more, and each is told so.
"""

import os
import signal
import traceback
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import Semaphore
from typing import Any, NamedTuple

from titan_moe.runtime.launch import end_with_parent


class AbandonedError(Exception):
    """Raised in a rank if the values that it waits for can no longer come."""


class Meeting(NamedTuple):
    """Identifies one exchange of values by its key and its members' ranks."""

    key: Hashable
    members: tuple[int, ...]


class Peers:
    """The other ranks, for one of them."""

    def __init__(self, pipe: Connection, turns: Semaphore) -> None:
        self._pipe, self._turns = pipe, turns

    def exchange(self, meeting: Meeting, value: Any) -> list[Any]:
        """Returns the values of all members, in their order; waits for them.

        Raises AbandonedError when a member never comes.
        """
        self._pipe.send((meeting, value))
        self._turns.release()
        values = self._pipe.recv()
        self._turns.acquire()
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


def run_ranks(fn: Callable[[int, Peers], None], world_size: int) -> Generator[Report, None, None]:
    """Call `fn(rank, peers)` for every rank, each in a process forked from this one, and yield what
    they report and how they end, as it comes.

    As many ranks compute at a time as there are cores. Call it in a process that has one thread; no
    rank outlives it.
    """
    world = _World()
    try:
        for rank in range(world_size):
            world.fork(fn, rank)
        while world.ranks:
            for pipe in wait(list(world.ranks)):
                report = world.hear(pipe)  # type: ignore[arg-type]
                if report is not None:
                    yield report
            world.abandon_if_stuck()
    finally:
        world.close()


class _World:
    """The ranks that have not ended, and the values of those that wait for others."""

    def __init__(self) -> None:
        self.ranks: dict[Connection, int] = {}
        self._processes: list[int] = []
        self._turns = get_context("fork").Semaphore(os.cpu_count() or 1)
        self._waiting: dict[Meeting, dict[int, tuple[Connection, Any]]] = {}

    def fork(self, fn: Callable[[int, Peers], None], rank: int) -> None:
        ours, theirs = Pipe()
        process = os.fork()
        if process == 0:
            # A pipe ends when its last holder has gone, so no rank holds another one's.
            for other in (ours, *self.ranks):
                other.close()
            _run(fn, rank, theirs, self._turns)
        theirs.close()
        self._processes.append(process)
        self.ranks[ours] = rank

    def hear(self, pipe: Connection) -> Report | None:
        rank = self.ranks[pipe]
        try:
            what, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            self._turns.release()  # It has died in its turn.
            what, value = "end", "its process has died"
        if isinstance(what, Meeting):
            there = self._waiting.setdefault(what, {})
            there[rank] = pipe, value
            if len(there) == len(what.members):
                self._answer(what, [there[member][1] for member in what.members])
            return None
        if what is None:
            return Report(rank, value)
        del self.ranks[pipe]
        pipe.close()
        return Report(rank, None, value, has_ended=True)

    def abandon_if_stuck(self) -> None:
        """Answer all ranks that wait if no other rank is left."""
        if sum(map(len, self._waiting.values())) >= len(self.ranks):
            for meeting in list(self._waiting):
                self._answer(meeting, None)

    def close(self) -> None:
        for pipe in self.ranks:
            pipe.close()
        for process in self._processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)

    def _answer(self, meeting: Meeting, values: Sequence[Any] | None) -> None:
        told = bytes(ForkingPickler.dumps(values))  # `Connection.send`'s bytes, made once.
        for pipe, _ in self._waiting.pop(meeting).values():
            with suppress(BrokenPipeError):  # It has died; its end is heard next.
                pipe.send_bytes(told)


def _run(fn: Callable[[int, Peers], None], rank: int, pipe: Connection, turns: Semaphore) -> None:
    """Calls `fn` and ends this process, without what its parent would do at its own end."""
    error = ""
    end_with_parent()
    try:
        turns.acquire()
        fn(rank, Peers(pipe, turns))
    except BaseException:
        error = traceback.format_exc()
    with suppress(BrokenPipeError):
        pipe.send(("end", error))
    turns.release()
    os._exit(0)
