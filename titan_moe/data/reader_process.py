"""A step reader in a process of its own.

Python runs one thread at a time. In the process that launches kernels, tokenizing and packing would
keep the launching thread waiting.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.data.batch import PackedBatch
from titan_moe.data.step_reader import Identity, StepReader
from titan_moe.runtime.child_process import ChildProcess, receive, send
from titan_moe.runtime.errors import RunError


class ReaderProcess:
    """As the `StepReader` that `build.build_reader` makes of the same arguments, elsewhere."""

    def __init__(self, training: Training, tokenizer_path: str, **place: Any) -> None:
        """`place`: build_reader's keywords. Raises what it raises."""
        self._child = ChildProcess("titan_moe.data.reader_process:serve")
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
        self._child.close()

    def _ask(self, *request: Any) -> Any:
        try:
            self._child.send(request)
            kind, answer = self._child.receive()
        except (EOFError, ConnectionError):
            raise RunError(
                f"the process that reads the data {self._child.last_words()}: start again from the "
                "latest checkpoint"
            ) from None
        if kind is ConfigError:
            raise ConfigError(answer)
        if kind is RunError:
            raise RunError(answer)
        return answer


def serve(pipe: Connection) -> None:
    """The child: answer the parent's requests."""
    reader: StepReader | None = None
    while True:
        request = receive(pipe)
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
        send(pipe, reply)


def _build(training: Training, tokenizer_path: str, place: dict[str, Any]) -> StepReader:
    from titan_moe.data.build import build_reader
    from titan_moe.data.tokenizer import load_tokenizer

    return build_reader(training, load_tokenizer(tokenizer_path), **place)
