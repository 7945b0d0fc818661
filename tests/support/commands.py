"""Run a command of titan-moe: in this process, or as a user does."""

import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from tests.support.paths import REPO
from tests.support.processes import start_process
from titan_moe.cli.main import main

TITAN_MOE = [sys.executable, "-m", "titan_moe"]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_command(*words: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in this process, and undoes its changes of the process."""
    argv = [str(word) for word in words]
    out, err = io.StringIO(), io.StringIO()
    with undone(), redirect_stdout(out), redirect_stderr(err):
        code = main(argv)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def start_command(*words: object, cwd: Path = REPO, **options: object) -> subprocess.Popen[str]:
    """Starts a command on the CPU, with the code of `cwd`; both outputs are one."""
    return start_process(
        [*TITAN_MOE, *words],
        cwd=cwd,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


@contextmanager
def undone() -> Iterator[None]:
    """Undoes changes of handlers, loggers, threads and variables of this process."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    logger, threads = logging.getLogger("titan_moe"), torch.get_num_threads()
    logs = logger.handlers[:], logger.propagate, logger.level
    variables = dict(os.environ)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logger.handlers[:], logger.propagate = logs[0], logs[1]
        logger.setLevel(logs[2])
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(variables)
