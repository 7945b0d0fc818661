"""A reader of steps in a process of its own.

Python runs one thread at a time. In the process that launches a GPU's kernels, tokenizing and
packing would keep the launching thread waiting.
"""

import atexit
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.config.plugins import import_modules
from titan_moe.data.build import build_reader
from titan_moe.data.reader import Microbatches, StepReader
from titan_moe.data.sequences import Identity
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.launch import end_with_parent


class ReaderProcess:
    """Runs a `StepReader` in a child process, with the same methods."""

    def __init__(
        self, training: Training, tokenizer_path: str, imports: Sequence[str] = (), **place: Any
    ) -> None:
        """`imports`: job.imports. `place`: keywords of `build_reader`, whose errors it raises."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._child.start()
        # Python's own end would wait for it, and it ignores the SIGTERM that it then gets.
        atexit.register(self._child.kill)
        theirs.close()
        self.identity: Identity
        self.identity, self._state = self._ask(training, tokenizer_path, imports, place)

    def read_step(self) -> tuple[Microbatches, dict[str, Any]]:
        microbatches, self._state = self._ask("read_step")
        return microbatches, self._state

    def count_steps(self) -> int:
        steps: int = self._ask("count_steps")
        return steps

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = self._ask("load_state_dict", state)

    def close(self) -> None:
        """End the child at once; a `read_step` that another thread waits in raises RunError."""
        self._child.kill()
        self._child.join()

    def _ask(self, *request: Any) -> Any:
        try:
            self._pipe.send(request)
            kind, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._child.join()
            code = self._child.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended: {code}"
            guess = " (often: out of memory)" if code == -signal.SIGKILL else ""
            raise RunError(
                f"the process that reads the data {how}{guess}: start again from the latest "
                "checkpoint"
            ) from None
        if kind is not None:
            raise kind(answer)
        return answer


def _serve(pipe: Connection) -> None:
    """Answer the rank's requests in the child, until the rank is gone."""
    # They go to all processes of a terminal or a job, and are the rank's to answer.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    reader: StepReader | None = None
    while True:
        try:
            request = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # A library's thread that waits for a network would keep the process.
        reply: tuple[type[Exception] | None, Any]
        try:
            if reader is None:
                training, tokenizer_path, imports, place = request
                if problems := import_modules(imports):
                    raise ConfigError(problems)
                reader = build_reader(training, load_tokenizer(tokenizer_path, training), **place)
                reply = None, (reader.identity, reader.state_dict())
            elif request[0] == "read_step":
                reply = None, reader.read_step()
            elif request[0] == "count_steps":
                reply = None, reader.count_steps()
            else:
                reader.load_state_dict(request[1])
                reply = None, reader.state_dict()
        except ConfigError as error:
            reply = ConfigError, error.lines
        except RunError as error:
            reply = RunError, str(error)
        pipe.send(reply)
