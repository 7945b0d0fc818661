"""Call a function on many arguments, each call in a fresh process, a few at a time.

Processes are forked from a server that has imported torch and the trainer once: no call leaves
anything to the next (process groups, DTensor's caches, random states), and none imports torch.
"""

import gc
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from signal import Signals
from typing import Any

TIMEOUT_S = 300.0
"""The longest wait for processes; the limit of tests and of the collectives in them, too."""
# FSDP2 and the first optimizer bring in torch._dynamo.
PRELOAD = ["torch", "torch._dynamo", __name__]
"""Modules that the server imports before it forks, besides that of its first call."""
_JOIN_S = 5.0


class WorkerError(RuntimeError):
    """A call raised, its process died or it took too long; the message holds the traceback."""


def in_fresh_processes(
    fn: Callable[..., Any], tasks: Sequence[tuple], *, num_workers: int
) -> Iterator[tuple[int, Any]]:
    """Yield (index, fn(*tasks[index])) as the calls end. Raises WorkerError.

    `fn` must be a module's top-level function; arguments and results travel by pickle.
    """
    for index, value, error in outcomes(fn, tasks, num_workers=num_workers, preload=fn.__module__):
        if error is not None:
            raise WorkerError(f"{fn.__name__} {index}:\n{error}")
        yield index, value


def outcomes(
    fn: Callable[..., Any],
    tasks: Sequence[tuple],
    *,
    num_workers: int,
    preload: str,
    timeout_s: float | None = None,
) -> Generator[tuple[int, Any, str | None], None, None]:
    """Yield (index, result, error) of all calls in the order they end. No process outlives the
    iteration. An error is the traceback, or how the process died.

    Args:
        preload: a module that the server imports besides torch, if no server runs yet.

    Raises:
        WorkerError: calls have not ended after `timeout_s`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, preload])
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    running: dict[Any, tuple[int, BaseProcess]] = {}
    waiting = list(enumerate(tasks))[::-1]
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                index, arguments = waiting.pop()
                result, sender = context.Pipe(duplex=False)
                process = context.Process(target=_call, args=(sender, fn, arguments), daemon=True)
                process.start()
                sender.close()
                running[result] = index, process
            ready = wait(list(running), None if deadline is None else deadline - time.monotonic())
            if not ready:
                late = sorted(index for index, _ in running.values())
                raise WorkerError(f"{late} had not ended after {timeout_s:g} s")
            for pipe in ready:
                index, ended = running.pop(pipe)
                yield index, *_end(ended, pipe)  # type: ignore[arg-type]
    finally:
        for _, left in running.values():
            left.kill()
            left.join()


def _end(process: BaseProcess, pipe: Connection) -> tuple[Any, str | None]:
    with pipe:
        try:
            end: tuple[Any, str | None] = pickle.loads(pipe.recv_bytes())
        except EOFError:
            process.join(_JOIN_S)
            code = process.exitcode
            how = f"was killed by {Signals(-code).name}" if code and code < 0 else "ended"
            end = None, f"the process {how} without a result (exit code {code})"
    process.join(_JOIN_S)
    if process.is_alive():  # Its result is here; its end hangs.
        process.kill()
        process.join()
    return end


def _call(pipe: Connection, fn: Callable[..., Any], arguments: tuple) -> None:
    # A tenth of the time otherwise; the process ends before its garbage matters.
    gc.disable()
    try:
        # Plain pickle: multiprocessing's own would share tensors by file handles that die with us.
        pipe.send_bytes(pickle.dumps((fn(*arguments), None)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))
