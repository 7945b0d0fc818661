"""Files that others read while a run writes them, folders of earlier runs, and the lock that lets
one run at a time write into a folder.

The lock is flock(2) on a file that names its holder. The kernel gives it back when the process
ends, however it ends: there is no stale lock, and a lock file that somebody removes ends no run.
"""

import fcntl
import hashlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from titan_moe.runtime.errors import RunError

LOCK = ".lock"
_STEP = re.compile(r"step-(\d+)")
_locked: list[TextIO] = []
"""The lock files of this process, open until it ends."""

logger = logging.getLogger(__name__)


def lock_folder(folder: Path, key: str) -> TextIO:
    """Lock a folder, which is made if need be, until this process ends or closes the returned file.

    A file system without flock(2) gets a warning in place of a lock.

    Args:
        key: the configuration's key that names the folder.

    Raises:
        RunError: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise RunError(
            f"{folder} is in use by {holder}: wait for it or stop it, or choose another {key}"
        ) from None
    except OSError as error:
        logger.warning("cannot lock %s (%s): let no other run write there", folder, error.strerror)
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    file.write(f"process {os.getpid()} of {socket.gethostname()} since {since}\n")
    file.flush()
    _locked.append(file)
    return file


def take_folder(folder: Path, key: str) -> TextIO:
    """Lock a folder that only this program writes to: a new one, or one that a killed process left.
    Closing the returned file gives it back.

    Raises:
        RunError: another process is writing there, or the folder is not this program's.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / LOCK).is_file()):
            raise RunError(f"{folder} is in the way: move it, or choose another {key}") from None
    return lock_folder(folder, key)


def fsync(path: Path) -> None:
    """Wait until a file, or a folder's own entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    result = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 22):
            result.update(block)
    return result.hexdigest()


def set_aside(path: Path, name: Callable[[int], str]) -> Path:
    """Rename a file or folder to the first free of name(1), name(2), ...; returns its new path."""
    number = 1
    while (target := path.with_name(name(number))).exists():
        number += 1
    return path.rename(target)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, with the suffix of `path`, which it replaces once it is on disk.

    A reader finds the old content or the new one. A kill or an error leaves the old one.
    """
    aside = path.with_name(f".tmp-{path.name}")
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        # A failed write does not name its file. A library's error may have no number.
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text so that a reader finds the old content or the new one."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def step_folder(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint of a step."""
    return folder / f"step-{step}"


def saved_steps(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in `folder`, ascending."""
    if not folder.is_dir():
        return []
    matches = [_STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()]
    return sorted(int(match[1]) for match in matches if match)
