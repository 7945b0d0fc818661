"""One run at a time writes into a run's folder.

The lock is a file that says which process holds it, and counts up while that process lives. A
process of this machine is looked up by its number and the time it began; of another machine, whose
clock and processes cannot be asked, the count is watched. So a lock that a killed run has left
behind is recognised in either case, on file systems of one machine or of many.
"""

import json
import logging
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import parse_json

LOCK = ".lock"
_BEATS_AWAY = 6
"""How often in a row a folder may not be there: a network file system may come back."""
_HALF_WRITTEN_S = 0.5
"""Without hard links a lock is there before its content is."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """The process that a lock names."""

    token: str
    """Drawn anew each time that the lock is taken."""
    host: str
    place: str
    """Boot and process namespace: where a process number means the same process."""
    pid: int
    began: str
    """When the process did, in clock ticks since the boot: its number is given again later."""
    since: str
    count: int = 0


_KINDS = {field.name: field.type for field in fields(Holder)}


class RunLock:
    """The lock of a folder, for one process.

    Args:
        folder: made if need be.
        key: the configuration's that names the folder.
        beat_s: how often the count goes up. A lock of another machine is given up for stale when it
            has not for three times as long.
        on_loss: called with a line where the folder stays away, or another process has taken the
            lock, to which this one, standing still, seemed dead. It must write nothing more.
    """

    def __init__(
        self,
        folder: Path,
        *,
        key: str = "job.dump_folder",
        beat_s: float = 10.0,
        on_loss: Callable[[str], None] | None = None,
    ) -> None:
        self._folder = folder
        self._key = key
        self._path = folder / LOCK
        self._beat_s = beat_s
        self._holder = _this_process()
        self._stopped = threading.Event()
        self._on_loss = on_loss or _end_process
        self._lost = False
        self._patience = time.monotonic() + 6 * beat_s
        self._thread = threading.Thread(target=self._count_up, name="run lock", daemon=True)

    def acquire(self) -> None:
        """Take the lock. Raises RunError where a process that lives holds it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while not self._create(self._path):
            other = self._read()
            if other is None:
                continue  # Released in between.
            if self._lives(other):
                raise RunError(
                    f"{self._folder} is in use by process {other.pid} of {other.host} since "
                    f"{other.since}: wait for it or stop it, or choose another {self._key}"
                )
            if self._replace(other):
                break
        self._thread.start()

    def release(self) -> None:
        """Give the lock back, and remove a folder that is empty."""
        self._stopped.set()
        self._thread.join()
        if not self._lost and _same(self._read(), self._holder):
            self._path.unlink(missing_ok=True)
            with suppress(OSError):
                self._folder.rmdir()

    def _create(self, path: Path) -> bool:
        """Whether this process made the file, with its content: a link is made by one alone, also
        on file systems of several machines."""
        aside = self._write_aside()
        try:
            os.link(aside, path)
            return True
        except FileExistsError:
            return False
        except OSError:  # No hard links on this file system.
            with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
                file.write(aside.read_text(encoding="utf-8"))
                return True
            return False
        finally:
            aside.unlink()

    def _write_aside(self) -> Path:
        aside = self._path.with_name(f"{LOCK}.{self._holder.token}")
        with aside.open("w", encoding="utf-8") as file:
            json.dump(asdict(self._holder), file)
            file.flush()
            os.fsync(file.fileno())
        return aside

    def _read(self) -> Holder | None:
        end = time.monotonic() + _HALF_WRITTEN_S
        while True:
            try:
                return _holder(parse_json(self._path.read_bytes()))
            except FileNotFoundError:
                return None
            except ValueError:
                if time.monotonic() > end:
                    raise RunError(
                        f"{self._path} is damaged: if no run writes to {self._folder}, remove it"
                    ) from None
            time.sleep(_HALF_WRITTEN_S / 20)

    def _lives(self, other: Holder) -> bool:
        if other.place and other.place == self._holder.place:
            return _began(other.pid) == other.began
        logger.warning(
            "%s is held by process %d of %s: waiting for %.0f s to see whether it lives",
            self._folder,
            other.pid,
            other.host,
            3 * self._beat_s,
        )
        end = time.monotonic() + 3 * self._beat_s
        while time.monotonic() < end:
            time.sleep(self._beat_s / 10)
            if self._read() != other:
                return _same(self._read(), other)
        return False

    def _replace(self, stale: Holder) -> bool:
        """Whether this process, of all that found the lock stale, is the one that took it over.

        Raises RunError where one of them was killed as it did.
        """
        permit = self._path.with_name(f"{LOCK}.after.{stale.token}")
        if not self._create(permit):
            time.sleep(self._beat_s / 10)
            if permit.exists() and _same(self._read(), stale) and time.monotonic() > self._patience:
                raise RunError(f"{self._folder} was being taken over: remove {permit}")
            return False
        try:
            if not _same(self._read(), stale):
                return False
            logger.warning(
                "process %d of %s, which held %s, has ended", stale.pid, stale.host, self._folder
            )
            self._write_aside().replace(self._path)
            return True
        finally:
            permit.unlink()

    def _how_lost(self, found: Holder | None) -> str:
        if found is None:
            return (
                f"{self._path} is gone: bring the folder or its file system back and start the "
                "same command again"
            )
        return (
            f"another run has taken {self._folder} over while this process stood still: this run "
            "ends"
        )

    def _count_up(self) -> None:
        away = 0
        while not self._stopped.wait(self._beat_s):
            try:
                found = self._read()
                away = 0 if self._folder.is_dir() else away + 1
                if found is None and away < _BEATS_AWAY:
                    # Another process may make one too: the next beat reads whose it is.
                    if not away and self._create(self._path):
                        logger.warning("%s was gone: it is made again", self._path)
                    continue
                if not _same(found, self._holder):
                    self._lost = True
                    return self._on_loss(self._how_lost(found))
                self._holder = replace(self._holder, count=self._holder.count + 1)
                self._write_aside().replace(self._path)
            except (OSError, RunError) as error:  # A file system that is away may come back.
                logger.warning("cannot renew %s: %s", self._path, error)


def _end_process(line: str) -> None:
    logger.error(line)
    os.kill(os.getpid(), signal.SIGTERM)


def _holder(record: object) -> Holder:
    """ValueError where a file holds something else than a lock."""
    if not isinstance(record, dict) or {name: type(v) for name, v in record.items()} != _KINDS:
        raise ValueError("no lock")
    if not re.fullmatch(r"\w{1,99}", record["token"], re.ASCII):  # It is part of a file's name.
        raise ValueError("no lock's token")
    return Holder(**record)


def _same(found: Holder | None, other: Holder) -> bool:
    return found is not None and found.token == other.token


def _this_process() -> Holder:
    return Holder(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        place=_place(),
        pid=os.getpid(),
        began=_began(os.getpid()),
        since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    )


def _place() -> str:
    """Empty where there is no /proc: all processes then count as another machine's."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(pid: int) -> str:
    """Empty for a process that is not there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name, in brackets, may hold anything; the 22nd field is the 20th behind it.
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
