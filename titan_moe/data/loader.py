"""The loader of one data rank reads its share of each global batch ahead, in the background.

Python runs one thread at a time. In the process that launches a GPU's kernels, tokenizing and
packing would keep the launching thread waiting: there a process of its own reads.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.config.plugins import import_modules
from titan_moe.data.batch import Batch, stack_sequences
from titan_moe.data.build import build_reader
from titan_moe.data.reader import Microbatches, StepReader
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.launch import end_with_parent

if TYPE_CHECKING:
    import torch


class Loader:
    """Yields the microbatches of one data rank, step by step.

    One background thread reads up to `prefetch_factor` steps ahead of the caller. The state belongs
    to the last step handed out; steps that were read ahead are read again after a resume.
    """

    def __init__(
        self,
        reader: StepReader | ReaderProcess,
        *,
        prefetch_factor: int,
        pin_for: torch.device | None = None,
    ) -> None:
        """`pin_for`: the CUDA device that page-locked memory is copied to; None: plain memory."""
        self.identity = reader.identity
        self._reader = reader
        self._prefetch_factor = prefetch_factor
        self._pin_for = pin_for
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="data", initializer=self._begin_thread
        )
        self._ahead: deque[Future[tuple[list[Batch], dict[str, Any]]]] = deque()
        self._state = reader.state_dict()

    def next_step(self) -> list[Batch]:
        """All microbatches of the next step, in order.

        RunError when the data ran out or cannot be read; asking again raises the same error.
        """
        self._read_ahead()
        batches, state = self._ahead[0].result()
        self._ahead.popleft()
        self._read_ahead()
        self._state = state
        return batches

    def count_steps(self) -> int:
        """The steps from here to the end of training.epochs; before `next_step`."""
        return self._reader.count_steps()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state after the last step handed out: this rank's sequences by number."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the step at which `state`, merged over all ranks, was taken.

        The number of data ranks may differ from then. RunError if the state is another stream's.
        """
        self._forget_ahead()
        self._reader.load_state_dict(state)
        self._state = self._reader.state_dict()

    def close(self) -> None:
        """End the background thread, after the step it is reading, and the reader's process."""
        self._reader.close()
        self._forget_ahead()
        self._thread.shutdown()

    def _read_ahead(self) -> None:
        while len(self._ahead) < self._prefetch_factor:
            self._ahead.append(self._thread.submit(self._read_step))

    def _forget_ahead(self) -> None:
        for future in reversed(self._ahead):
            future.cancel()
        for future in self._ahead:
            if not future.cancelled():
                future.exception()  # Waits: the thread must leave the reader alone.
        self._ahead.clear()

    def _begin_thread(self) -> None:
        if self._pin_for is not None:
            import torch

            # A thread's own device is the first: page-locked memory would make a context there.
            torch.cuda.set_device(self._pin_for)

    def _read_step(self) -> tuple[list[Batch], dict[str, Any]]:
        microbatches, pin = self._reader.read_step(), self._pin_for is not None
        batches = [stack_sequences(sequences, pin=pin) for sequences in microbatches]
        return batches, self._reader.state_dict()


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
        self.identity = self._ask(training, tokenizer_path, imports, place)

    def read_step(self) -> Microbatches:
        return self._ask("read_step")

    def count_steps(self) -> int:
        return self._ask("count_steps")

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ask("load_state_dict", state)

    def close(self) -> None:
        """End the child at once; a `read_step` that another thread waits in raises RunError."""
        self._child.kill()
        self._child.join()

    def _ask(self, *request: Any) -> Any:
        """Returns the child's answer, and keeps the reader's state after it."""
        try:
            self._pipe.send(request)
            error, answer, self._state = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._child.join()
            code = self._child.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended: {code}"
            guess = " (often: out of memory)" if code == -signal.SIGKILL else ""
            raise RunError(
                f"the process that reads the data {how}{guess}: start again from the latest "
                "checkpoint"
            ) from None
        if error is not None:
            raise error
        return answer


def _serve(pipe: Connection) -> None:
    """Answer the rank's requests in the child, until the rank is gone: the first makes the reader,
    each later one names a method and its arguments."""
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
        error, answer = None, None
        try:
            if reader is None:
                training, tokenizer_path, imports, place = request
                if problems := import_modules(imports):
                    raise ConfigError(problems)
                reader = build_reader(training, load_tokenizer(tokenizer_path, training), **place)
                answer = reader.identity
            else:
                method, *arguments = request
                answer = getattr(reader, method)(*arguments)
        except (ConfigError, RunError) as raised:
            error = raised
        pipe.send((error, answer, reader and reader.state_dict()))
