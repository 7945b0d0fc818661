"""The loader of one data rank reads its share of each global batch ahead, in the background."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from titan_moe.data.batch import Batch, stack_sequences
from titan_moe.data.reader import StepReader
from titan_moe.data.reader_process import ReaderProcess

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
        microbatches, state = self._reader.read_step()
        pin = self._pin_for is not None
        return [stack_sequences(sequences, pin=pin) for sequences in microbatches], state
