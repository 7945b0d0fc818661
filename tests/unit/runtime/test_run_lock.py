"""One run writes into a folder; what a killed one left behind is recognised."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from titan_moe.runtime.errors import RunError
from titan_moe.runtime.run_lock import LOCK, RunLock

_BEAT_S = 0.05
_HOLD = """
import sys, time
from pathlib import Path
from titan_moe.runtime.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), beat_s=0.05)
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path / "run"."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, tmp_path / "run"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def _edit(folder, **changes):
    path = folder / LOCK
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_second_run_is_refused_and_the_first_goes_on(tmp_path, holder):
    with pytest.raises(RunError, match=f"in use by process {holder.pid} of .*job.dump_folder"):
        RunLock(tmp_path / "run").acquire()
    assert os.listdir(tmp_path / "run") == [LOCK]


def _take_over(folder, holder):
    holder.kill()
    holder.wait()
    lock = RunLock(folder / "run")
    lock.acquire()
    lock.release()
    assert os.listdir(folder) == []


def test_a_killed_run_s_lock_is_taken_over(tmp_path, holder):
    _take_over(tmp_path, holder)


def test_a_number_that_another_process_has_now(tmp_path, holder):
    _edit(tmp_path / "run", began="1")
    RunLock(tmp_path / "run", beat_s=60).acquire()


def test_a_run_of_another_machine_lives_while_it_counts(tmp_path, holder):
    run = tmp_path / "run"
    place = json.loads((run / LOCK).read_text())["place"]
    mine = RunLock(run, beat_s=0.5)
    mine._holder = mine._holder.__class__(**{**vars(mine._holder), "place": f"not {place}"})
    with pytest.raises(RunError, match="in use by process"):
        mine.acquire()
    holder.kill()
    holder.wait()
    mine.acquire()
    mine.release()


def test_a_file_system_without_hard_links(tmp_path, holder, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(RunError, match="in use by process"):
        RunLock(tmp_path / "run").acquire()
    _take_over(tmp_path, holder)


def test_a_damaged_lock_is_named(tmp_path):
    (tmp_path / LOCK).write_text("{")
    with pytest.raises(RunError, match=r"\.lock is damaged: if no run writes to"):
        RunLock(tmp_path).acquire()


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path, holder):
    holder.kill()
    holder.wait()
    locks = [RunLock(tmp_path / "run", beat_s=60) for _ in range(16)]
    got, start = [], threading.Barrier(len(locks))

    def take(lock):
        start.wait()
        try:
            lock.acquire()
            got.append(lock)
        except RunError:
            pass

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    assert os.listdir(tmp_path / "run") == [LOCK]
    got[0].release()


def test_one_that_was_killed_as_it_took_over(tmp_path, holder):
    holder.kill()
    holder.wait()
    token = json.loads((tmp_path / "run" / LOCK).read_text())["token"]
    permit = tmp_path / "run" / f"{LOCK}.after.{token}"
    permit.touch()
    with pytest.raises(RunError, match=f"was being taken over: remove {permit}"):
        RunLock(tmp_path / "run", beat_s=_BEAT_S).acquire()
    permit.unlink()
    RunLock(tmp_path / "run").acquire()


def test_a_run_whose_folder_is_gone_ends_and_says_so(tmp_path):
    lines, heard = [], threading.Event()

    def on_loss(line):
        lines.append(line)
        heard.set()

    lock = RunLock(tmp_path / "run", beat_s=_BEAT_S, on_loss=on_loss)
    lock.acquire()
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert heard.wait(30)
    path = tmp_path / "run" / LOCK
    (line,) = lines
    assert line.startswith(f"{path} is gone: bring the folder or its file system back")
    lock.release()
    assert not (tmp_path / "run").exists()


def test_a_run_that_stood_still_ends_when_it_was_taken_over(tmp_path, holder):
    holder.send_signal(signal.SIGSTOP)
    _edit(tmp_path / "run", token="another")
    holder.send_signal(signal.SIGCONT)
    assert holder.wait(timeout=30) == -signal.SIGTERM
    assert json.loads((tmp_path / "run" / LOCK).read_text())["token"] == "another"
