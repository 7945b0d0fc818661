"""A process of ours beside a rank, without torch, that answers the rank's requests.

It ends when the rank does, however that ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from titan_moe.runtime.launch import end_with_parent

# Not multiprocessing's own start: that would import the main module, and torch with it.
_CHILD = """\
import sys
sys.path[:] = {path!r}
from titan_moe.runtime.child_process import serve
serve({function!r}, {handle})
"""
_LEFT_TO_THE_RANK = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class ChildProcess:
    """Runs `function` of a module, "module:function", which is given the other end of a pipe."""

    def __init__(self, function: str, *, handles: tuple[int, ...] = ()) -> None:
        """`handles`: open files that the child has too, under the same numbers."""
        self._pipe, theirs = Pipe()
        with theirs:
            handle = theirs.fileno()
            code = _CHILD.format(path=sys.path, function=function, handle=handle)
            self._child = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[handle, *handles],
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, request: Any) -> None:
        """Raises ConnectionError when the child is gone."""
        send(self._pipe, request)

    def answered(self, seconds: float) -> bool:
        """Whether there is an answer, or the child is gone; waits for it so long at most."""
        return self._pipe.poll(seconds)

    def receive(self) -> Any:
        """The next answer. Raises EOFError or ConnectionError when the child is gone."""
        return receive(self._pipe)

    def last_words(self) -> str:
        """How the child, which is gone, has ended."""
        code = self._child.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        guess = " (often: out of memory)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{guess}"

    def close(self) -> int:
        """End the child at once, also while another thread waits for its answer; returns its exit
        code."""
        self._child.kill()
        return self._child.wait()


def send(pipe: Connection, value: Any) -> None:
    pipe.send_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def serve(function: str, handle: int) -> None:
    """The child: answer the parent's requests until it is gone."""
    for number in _LEFT_TO_THE_RANK:  # They go to all processes of a terminal or a job.
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    module, _, name = function.partition(":")
    with suppress(EOFError, ConnectionError):
        getattr(import_module(module), name)(Connection(handle))
    os._exit(0)  # A thread of a library that waits for a network would keep the process.
