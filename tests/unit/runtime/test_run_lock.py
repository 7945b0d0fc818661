"""One run writes into a folder; what a killed one left behind is recognised."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.runtime.run_lock import LOCK, RunLock
from titan_moe.train import _only_run, _places, _written_folders

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


def test_checkpoints_outside_of_the_run_s_folder_have_a_lock_too(tmp_path):
    def written(name, **checkpoint):
        keys = {"enable": True} | checkpoint
        job = JobConfig(job={"dump_folder": str(tmp_path / name)}, checkpoint=keys)
        return list(_written_folders(job))

    shared, outside = tmp_path / "shared", "checkpoint.folder"
    shared.mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "checkpoint").symlink_to(shared)
    own = {name: (tmp_path / name, "job.dump_folder") for name in "ab"}
    assert written("a") == [own["a"]]
    assert written("a", folder=str(shared)) == [own["a"], (shared, outside)]
    assert written("b") == [own["b"], (tmp_path / "b" / "checkpoint", outside)]
    assert written("b", load_only=True) == [own["b"]]
    lock = RunLock(shared)
    lock.acquire()
    with pytest.raises(RunError, match=r"choose another checkpoint\.folder$"):
        RunLock(tmp_path / "b" / "checkpoint", key=outside).acquire()
    lock.release()


def _take(lock):
    """And give it back: its thread would write on."""
    lock.acquire()
    lock.release()


def _take_over(folder, holder):
    holder.kill()
    holder.wait()
    _take(RunLock(folder / "run"))
    assert os.listdir(folder) == []


def test_a_killed_run_s_lock_is_taken_over(tmp_path, holder):
    _take_over(tmp_path, holder)


def test_a_number_that_another_process_has_now(tmp_path, holder):
    _edit(tmp_path / "run", began="1")
    _take(RunLock(tmp_path / "run", beat_s=60))


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


def test_a_machine_of_the_same_name_is_another(tmp_path):
    """As containers are: a process of that number does not live here."""
    lock = RunLock(tmp_path / "run", beat_s=_BEAT_S, on_loss=print)
    lock._holder = replace(lock._holder, place="elsewhere", pid=2**22 + 1, began="1")
    lock.acquire()
    with pytest.raises(RunError, match=f"in use by process {2**22 + 1} of {lock._holder.host}"):
        RunLock(tmp_path / "run", beat_s=0.5).acquire()
    lock.release()


def test_a_run_gives_its_lock_back_when_it_fails_too(tmp_path):
    folder = tmp_path / "run"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(KeyError), _only_run(folder, "job.dump_folder", 0, None):
            assert os.listdir(folder) == [LOCK]
            raise KeyError
    finally:
        dist.destroy_process_group()
    assert os.listdir(tmp_path) == []


def test_a_lock_that_another_run_has_taken_is_not_given_back(tmp_path):
    lock = RunLock(tmp_path, beat_s=60)
    lock.acquire()
    _edit(tmp_path, token="another")
    lock.release()
    assert os.listdir(tmp_path) == [LOCK]


def test_a_file_system_without_hard_links(tmp_path, holder, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(RunError, match="in use by process"):
        RunLock(tmp_path / "run").acquire()
    _take_over(tmp_path, holder)


def test_a_lock_that_is_half_written_is_waited_for(tmp_path, holder):
    """As another process makes it where there are no hard links."""
    path = tmp_path / "run" / LOCK
    content = path.read_bytes()
    holder.kill()
    holder.wait()
    path.write_bytes(content[:20])
    threading.Timer(0.1, path.write_bytes, [content]).start()
    _take(RunLock(tmp_path / "run", beat_s=_BEAT_S))


@pytest.mark.parametrize(
    "change", [{"token": "../../x"}, {"pid": "1"}, {"count": None}, {"more": 1}, {"host": 1.5}]
)
def test_a_lock_of_other_values_is_damaged(tmp_path, holder, change):
    _edit(tmp_path / "run", **change)
    holder.kill()
    with pytest.raises(RunError, match=r"\.lock is damaged: if no run writes to"):
        RunLock(tmp_path / "run").acquire()


@pytest.mark.parametrize("content", ["{", "", "[]", "null", "{}"])
def test_a_damaged_lock_is_named(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
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
    _take(RunLock(tmp_path / "run"))


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


def test_a_lock_that_is_gone_is_made_again(tmp_path):
    """One ENOENT of a network file system, or a user who tidies up, ends no healthy run."""
    lost = []
    lock = RunLock(tmp_path, beat_s=_BEAT_S, on_loss=lost.append)
    lock.acquire()
    (tmp_path / LOCK).unlink()
    end = time.monotonic() + 30
    while not (lost or (tmp_path / LOCK).exists()) and time.monotonic() < end:
        time.sleep(_BEAT_S)
    assert lost == [] and (tmp_path / LOCK).exists()
    with pytest.raises(RunError, match="in use by process"):
        RunLock(tmp_path).acquire()
    while not lost and time.monotonic() < end:
        _edit(tmp_path, token="another")  # Again where a beat between its read and its write won.
        time.sleep(_BEAT_S)
    assert "another run has taken" in lost[0]
    lock.release()


def test_a_run_that_stood_still_ends_when_it_was_taken_over(tmp_path, holder):
    holder.send_signal(signal.SIGSTOP)
    _edit(tmp_path / "run", token="another")
    holder.send_signal(signal.SIGCONT)
    assert holder.wait(timeout=30) == -signal.SIGTERM
    assert json.loads((tmp_path / "run" / LOCK).read_text())["token"] == "another"


def _places_of_rank(folder):
    """Of a run whose checkpoints lead elsewhere on one node alone."""
    if dist.get_rank() == 1:
        folder = folder / "other"
        (folder / "checkpoint").mkdir(parents=True)
    job = JobConfig(job={"dump_folder": str(folder)}, checkpoint={"enable": True})
    return _places(job)


def test_all_ranks_lock_the_same_folders(tmp_path):
    """Each lock is a collective: ranks that saw other folders would answer one another's."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / "checkpoint").symlink_to(elsewhere)
    for found in run_on_ranks(_places_of_rank, 2, run):
        assert [place for place, _ in found] == [run, run / "checkpoint"]
