"""Call a function on many arguments, each call in a process of its own, a few at a time."""

import gc
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

TIMEOUT_S = 300.0
"""The longest that ranks or a process are waited for, the limit of every test too."""


class WorkerError(RuntimeError):
    """A call raised or its process died; the message holds its traceback."""


def in_fresh_processes(
    fn: Callable[..., Any], tasks: Sequence[tuple], *, num_workers: int
) -> Iterator[tuple[int, Any]]:
    """Yield (index, fn(*tasks[index])) as the calls end.

    Processes are forked from a server that has imported `fn`'s module, if no other such server runs
    yet: nothing of one call is left for the next. `fn` must be a module's top-level function;
    arguments and results travel by pickle. Raises WorkerError; no process outlives the iteration.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", fn.__module__, __name__])
    running: dict[Any, tuple[int, BaseProcess]] = {}
    waiting = iter(enumerate(tasks))
    try:
        while True:
            while len(running) < num_workers and (task := next(waiting, None)) is not None:
                index, arguments = task
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=_call, args=(theirs, fn, arguments), daemon=True
                )
                process.start()
                theirs.close()
                running[ours] = index, process
            if not running:
                return
            for pipe in wait(list(running)):
                index, process = running.pop(pipe)
                result = _result(pipe, f"{fn.__name__} {index}")  # type: ignore[arg-type]
                process.join()
                yield index, result
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _result(pipe: Connection, what: str) -> Any:
    with pipe:
        try:
            error, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            raise WorkerError(f"{what} died without a word") from None
    if error is not None:
        raise WorkerError(f"{what}:\n{error}")
    return value


def _call(pipe: Connection, fn: Callable[..., Any], arguments: tuple) -> None:
    # A tenth of the time otherwise; the process ends before its garbage matters.
    gc.disable()
    try:
        pipe.send_bytes(pickle.dumps((None, fn(*arguments))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
