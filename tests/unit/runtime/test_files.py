"""Files that a run writes are always whole, and one run at a time writes into a folder."""

import errno
import fcntl
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import start_process
from titan_moe import train
from titan_moe.config.job_config import JobConfig
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import LOCK, lock_folder, replacing, write_whole

_HOLD = """
import sys, time
from pathlib import Path
from titan_moe.runtime.files import lock_folder
lock_folder(Path(sys.argv[1]), "job.dump_folder")
print("locked", flush=True)
time.sleep(60)
"""


def test_replacing_keeps_the_old_content_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as aside:
        aside.write_text("new")
        assert aside.suffix == ".txt" and path.read_text() == "old"
        _ = 1 / 0
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_replacing_names_the_file_of_a_failed_write(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=str(tmp_path / "a.txt")), replacing(tmp_path / "a.txt"):
        raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def _locked(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Lets another process hold the lock of a folder."""
    words = [sys.executable, "-c", _HOLD, str(folder)]
    with start_process(words, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "locked\n"
        yield first
        first.kill()


def test_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _locked(folder) as first:
        refused = rf"in use by process {first.pid} of \S+ since .*another job\.dump_folder$"
        with pytest.raises(RunError, match=refused):
            lock_folder(folder, "job.dump_folder")
        with pytest.raises(RunError, match=refused):  # The refusal leaves the name there.
            lock_folder(folder, "job.dump_folder")
    lock_folder(folder, "job.dump_folder")


def test_lock_file_that_is_removed_ends_no_run(tmp_path: Path) -> None:
    with _locked(tmp_path) as first:
        (tmp_path / LOCK).unlink()
        lock_folder(tmp_path, "job.dump_folder")
        assert first.poll() is None


def test_file_system_without_locks_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING):
        lock_folder(tmp_path, "job.dump_folder")
    assert "let no other run write there" in caplog.text


def test_checkpoints_outside_the_run_folder_are_locked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[tuple[Path, str]] = []
    monkeypatch.setattr(train, "lock_folder", lambda *folder_and_key: locked.append(folder_and_key))

    def written(name: str, **checkpoint: object) -> list[tuple[Path, str]]:
        keys = {"enable": True} | checkpoint
        tables = {"job": {"dump_folder": str(tmp_path / name)}, "checkpoint": keys}
        job = JobConfig.model_validate(tables)
        locked.clear()
        assert train._take_folders(job, model_of_job(job.model)) == []
        return [*locked]

    shared, outside = tmp_path / "shared", "checkpoint.folder"
    shared.mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "checkpoint").symlink_to(shared)
    own = {name: (tmp_path / name, "job.dump_folder") for name in "ab"}
    assert written("a") == [own["a"]]
    assert written("a", folder=str(shared)) == [own["a"], (shared, outside)]
    assert written("b") == [own["b"], (tmp_path / "b" / "checkpoint", outside)]
    assert written("b", load_only=True) == [own["b"]]
