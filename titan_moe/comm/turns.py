"""Lets two pieces of work take turns: where one would wait for rows, the other computes."""

from collections.abc import Callable
from contextvars import copy_context
from threading import Semaphore, Thread

import torch
from torch.utils import _python_dispatch as dispatch

FORWARD, BACKWARD = 0, 1


class Turns:
    """Runs the forward of one chunk of a pipeline beside the backward of another.

    Exactly one of them runs at any time. It passes the turn on where it would wait for an exchange
    of rows, and gets it back where the other would wait, or has ended. So the order of issue
    follows from the two programs, and is the same on all ranks that run them. A GPU has both on
    one stream, in this order.

    Autograd cannot be left in the middle of a backward, which therefore runs in a thread of its
    own. The forward stays in the caller's, with all that torch keeps by thread: gradient mode,
    hooks of saved tensors, numbers of autograd's nodes. The backward's thread takes over the
    caller's device and stream, dispatch modes and context variables; a profiler does not see it.
    The forward must not run a backward itself: on a GPU both would need autograd's one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: set[int] = set()
        self._error: BaseException | None = None

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both to their ends, the forward first. Raises the first error of either, after the
        other has stopped at its next exchange."""
        self._turns = Semaphore(0), Semaphore(0)
        self._running = {FORWARD, BACKWARD}
        work = _as_in_this_thread(backward, self._device)

        def run_second() -> None:
            self._turns[BACKWARD].acquire()
            self._work(BACKWARD, work)

        thread = Thread(target=run_second, name="backward beside a forward")
        thread.start()
        self._work(FORWARD, forward)
        thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def pass_on(self, own: int) -> None:
        """Let the other work until it passes the turn on or ends; nothing where `own` is alone."""
        if len(self._running) == 2:
            self._turns[1 - own].release()
            self._turns[own].acquire()
        if self._error is not None:  # Not raised here as itself: its traceback is the other's.
            raise RuntimeError("the other half of this pair of turns failed") from self._error

    def _work(self, own: int, work: Callable[[], None]) -> None:
        try:
            if self._error is None:
                work()
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._running.remove(own)
            self._turns[1 - own].release()


def _as_in_this_thread(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Returns `work` with this thread's stream, dispatch modes and context variables."""
    context, modes = copy_context(), dispatch._get_current_dispatch_mode_stack()
    stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def run() -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)  # Its device too.
        for mode in modes:  # Not entered again: a mode may begin anew there.
            dispatch._push_mode(mode)
        try:
            context.run(work)
        finally:
            for _ in modes:
                dispatch._pop_mode()

    return run
