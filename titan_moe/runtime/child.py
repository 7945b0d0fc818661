"""torchrun as a process of its own, and what signals to its launcher do to it."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from titan_moe.runtime.launch import end_with_parent, ignores_hangups
from titan_moe.runtime.stopping import request_stop

EXIT_CODES = {signal.SIGINT: 130, signal.SIGHUP: 143, signal.SIGTERM: 143, signal.SIGUSR1: 143}
# A signal may come twice: to all processes of a job, and from the command that started them.
_SAME_SIGNAL_S = 1.0


def hold_requests() -> None:
    """Let a SIGUSR1 that comes before there is a torchrun wait until `Child.run` answers it: called
    before there is a thread, which inherits that. Linux keeps one that is ignored too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


class Child:
    """One torchrun.

    Where the run can save, SIGTERM and SIGUSR1 leave a request for its ranks and nothing else:
    torchrun would kill them 30 seconds after a SIGTERM, and dies of SIGUSR1. A second SIGTERM, or
    the end of the time that they have, ends the run as it is. So does any other signal.

    Args:
        records: the folder for requests.
        stop_timeout_s: the time that ranks have to stop; None where they cannot save.
    """

    def __init__(self, records: Path, stop_timeout_s: int | None) -> None:
        self.interrupted = 0
        """This process's own exit code where a signal ended the run."""
        self._records = records
        self._stop_timeout_s = stop_timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._terminated: float | None = None
        self._limit: threading.Timer | None = None

    def run(self, command: list[str], log: Path, variables: Mapping[str, str]) -> int:
        """Its exit code. In a session of its own it gets no signal but those from here, and
        SIGUSR1, which some clusters send to all processes of a job, is ignored there. It ends with
        this process, also where that is killed."""
        for number in EXIT_CODES:
            if not (number == signal.SIGHUP and ignores_hangups()):
                signal.signal(number, self._answer)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        with log.open("ab") as words:
            self._child = subprocess.Popen(
                command,
                env=variables,
                stderr=words,
                start_new_session=True,
                preexec_fn=partial(_begin, os.getpid()),
            )
            if self.interrupted:
                self._child.terminate()
            code = self._child.wait()
        for number in EXIT_CODES:  # Too late for any.
            signal.signal(number, signal.SIG_IGN)
        if self._limit is not None:
            self._limit.cancel()
        return code

    def _answer(self, number: int, frame: Any) -> None:
        seconds = self._stop_timeout_s
        asks = number == signal.SIGUSR1 or (number == signal.SIGTERM and not self._is_second())
        if seconds is None or not asks:
            return self._end(EXIT_CODES[signal.Signals(number)])
        request_stop(self._records)
        if self._limit is None:
            self._limit = threading.Timer(seconds, self._give_up)
            self._limit.daemon = True
            self._limit.start()
            _say("asked to stop: the state is saved after this step (SIGTERM: end without)")

    def _give_up(self) -> None:
        _say(f"not saved within training.stop_timeout_seconds={self._stop_timeout_s}")
        self._end(EXIT_CODES[signal.SIGTERM])

    def _is_second(self) -> bool:
        now = time.monotonic()
        if self._terminated is None:
            self._terminated = now
        return now - self._terminated > _SAME_SIGNAL_S

    def _end(self, code: int) -> None:
        self.interrupted = self.interrupted or code
        if self._child is not None:
            self._child.terminate()


def _begin(launcher: int) -> None:
    """In torchrun's process, before it is torchrun."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    end_with_parent()
    if os.getppid() != launcher:  # It has been killed just now.
        os._exit(1)


def _say(line: str) -> None:
    """From a signal handler, in which print may find itself half done. On a terminal a progress bar
    may be on the line."""
    os.write(1, ("\n" * os.isatty(1) + line + "\n").encode())
