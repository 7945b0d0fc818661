"""Start the processes that a test sends signals to, or waits for, and git."""

import signal
import subprocess
from collections.abc import Sequence
from typing import Any


def start_process(words: Sequence[object], **options: Any) -> subprocess.Popen[Any]:
    """Starts a program that signals end as usual. A shell that starts the suite in its background,
    nohup and some CI systems leave their children signals that are ignored."""
    command = [str(word) for word in words]
    return subprocess.Popen(command, preexec_fn=_default_signals, **options)


def git(folder: object, *words: object) -> str:
    """Runs git in a folder, as a made-up user; returns its output."""
    identity = ["-c", "user.name=x", "-c", "user.email=x"]
    command = ["git", "-C", folder, *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _default_signals() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
