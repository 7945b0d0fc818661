"""A step reader in a process of its own.

Python runs one thread at a time. In the process that launches kernels, tokenizing and packing would
keep the launching thread waiting.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.data.batch import PackedBatch
from titan_moe.data.step_reader import Identity, StepReader
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.launch import end_with_parent

# Not multiprocessing's own start: that would import the main module, and torch with it.
_CHILD = """\
import sys
sys.path[:] = {path!r}
from titan_moe.data.reader_process import serve
serve({handle})
"""
_LEFT_TO_THE_RANK = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class ReaderProcess:
    """As the `StepReader` that `build.build_reader` makes of the same arguments, elsewhere.

    The child ends when this process does, however that ends: its pipe is then closed.
    """

    def __init__(self, training: Training, tokenizer_path: str, **place: Any) -> None:
        """`place`: build_reader's keywords. Raises what it raises."""
        self._pipe, theirs = Pipe()
        with theirs:
            handle = theirs.fileno()
            code = _CHILD.format(path=sys.path, handle=handle)
            self._child = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[handle], stdin=subprocess.DEVNULL
            )
        self.identity: Identity
        self.identity, self._state = self._ask(training, tokenizer_path, place)

    def read_step(self) -> tuple[list[PackedBatch], dict[str, Any]]:
        batches, self._state = self._ask("read_step")
        return batches, self._state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = self._ask("load_state_dict", state)

    def close(self) -> None:
        """End the child at once; a `read_step` that another thread waits in raises RunError."""
        self._child.kill()
        self._child.wait()

    def _ask(self, *request: Any) -> Any:
        try:
            self._pipe.send_bytes(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
            kind, answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            raise RunError(self._last_words()) from None
        if kind is ConfigError:
            raise ConfigError(answer)
        if kind is RunError:
            raise RunError(answer)
        return answer

    def _last_words(self) -> str:
        code = self._child.wait()
        how = f"ended with exit code {code}"
        if code < 0:
            guess = " (often: out of memory)" if code == -signal.SIGKILL else ""
            how = f"was killed by {signal.Signals(-code).name}{guess}"
        return f"the process that reads the data {how}: start again from the latest checkpoint"


def serve(handle: int) -> None:
    """The child: answer the parent's requests until it is gone."""
    for number in _LEFT_TO_THE_RANK:  # They go to all processes of a terminal or a job.
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    with suppress(EOFError, ConnectionError):
        _serve(Connection(handle))
    os._exit(0)  # A thread of a library that waits for a network would keep the process.


def _serve(pipe: Connection) -> None:
    reader: StepReader | None = None
    while True:
        request = pickle.loads(pipe.recv_bytes())
        reply: tuple[type[Exception] | None, Any]
        try:
            if reader is None:
                reader = _build(*request)
                reply = None, (reader.identity, reader.state_dict())
            elif request[0] == "read_step":
                reply = None, reader.read_step()
            else:
                reader.load_state_dict(request[1])
                reply = None, reader.state_dict()
        except ConfigError as error:
            reply = ConfigError, error.lines
        except RunError as error:
            reply = RunError, str(error)
        pipe.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))


def _build(training: Training, tokenizer_path: str, place: dict[str, Any]) -> StepReader:
    from titan_moe.data.build import build_reader
    from titan_moe.data.tokenizer import load_tokenizer

    return build_reader(training, load_tokenizer(tokenizer_path), **place)
