"""One process: saves in the background are those of a step that waits, and fail in one line."""

import threading
import time

import pytest
import torch

from tests.support.jobs import until
from tests.support.saved_runs import Run, contents, full_disk, names, step_folder
from titan_moe.checkpoint import checkpointer as module
from titan_moe.checkpoint import folder as folders
from titan_moe.cli.audit import audit
from titan_moe.runtime.errors import RunError


@pytest.fixture
def disk(monkeypatch):
    """Writes wait until this event is set."""
    free, write = threading.Event(), module.FolderWriter.write_data

    def write_when_free(*args):
        free.wait(60)
        return write(*args)

    monkeypatch.setattr(module.FolderWriter, "write_data", write_when_free)
    return free


def _run(folder, **options):
    return Run(folder, **{"interval": 1, "async_mode": "async", **options})


def _step(run, step):
    run.optimizer.step()
    return run.checkpointer.maybe_save(step, {"step": step, "tokens": 0, "data": {"0": step}})


def _memory(run):
    copies = run.checkpointer._stager._copies
    return {name: copy.data_ptr() for name, copy in copies.items()}


def test_background_save_writes_the_files_of_a_save_that_waits(tmp_path):
    run, waiting = _run(tmp_path), _run(tmp_path / "waiting", async_mode="disabled")
    for step in (1, 2):
        assert _step(run, step) and _step(waiting, step)
    assert run.checkpointer.finish() == 2
    for step in (1, 2):
        folders_of_step = (step_folder(at, step) for at in (tmp_path, tmp_path / "waiting"))
        ours, theirs = map(contents, folders_of_step)
        # The manifest says who saved: another async_mode.
        different = {name for name in ours | theirs if ours.get(name) != theirs.get(name)}
        assert different == {"manifest.json"} and "__0_0.distcp" in ours
        assert audit(step_folder(tmp_path, step))["damaged"] == []


def test_background_save_writes_the_state_of_its_step(tmp_path, disk):
    run = _run(tmp_path)
    _step(run, 1)
    expected = run.weight
    run.optimizer.step()  # While nothing is written.
    disk.set()
    run.checkpointer.finish()
    other = Run(tmp_path, seed=1)
    assert other.checkpointer.load() == {"step": 1, "tokens": 0, "data": {"0": 1}}
    assert torch.equal(other.weight, expected) and not torch.equal(run.weight, expected)


def test_save_waits_for_the_one_before_and_keeps_the_last_complete_one(tmp_path, disk, caplog):
    caplog.set_level("INFO")
    run = _run(tmp_path, keep_latest_k=1)
    disk.set()
    _step(run, 1)
    run.checkpointer.finish()
    staged = _memory(run)
    disk.clear()
    _step(run, 2)
    time.sleep(0.1)
    assert "step-1" in names(tmp_path) and run.checkpointer.last_step == 1
    threading.Timer(0.2, disk.set).start()
    _step(run, 3)
    assert "step 3 waited" in caplog.text and "for the save before it" in caplog.text
    run.checkpointer.finish()
    assert names(tmp_path) == ["step-3"]
    assert _memory(run) == staged


def test_later_step_completes_a_save(tmp_path, disk):
    run = _run(tmp_path, interval=2)
    checkpointer = run.checkpointer
    _step(run, 2)
    checkpointer.maybe_save(3, {})
    assert checkpointer.last_step is None
    disk.set()
    until(lambda: checkpointer.maybe_save(3, {}) or checkpointer.last_step is not None, 30)
    assert checkpointer.last_step == 2 and names(tmp_path) == ["step-2"]


def test_last_save_is_complete_and_model_only(tmp_path):
    run = _run(tmp_path, last_save_model_only=True)
    _step(run, 1)
    assert run.checkpointer.maybe_save(2, {"step": 2, "data": {}}, last=True)
    assert names(tmp_path) == ["step-1", "step-2"] and run.checkpointer.last_step == 2
    assert not (step_folder(tmp_path, 2) / "train_state.json").exists()
    assert (step_folder(tmp_path, 1) / "train_state.json").exists()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_full_disk_fails_this_or_a_later_step_in_one_line(tmp_path, mode):
    run = _run(tmp_path, interval=2, dim=5000, async_mode=mode)
    run.save(1)
    with full_disk(), pytest.raises(RunError) as caught:
        _step(run, 2)
        for _ in range(2000):
            run.checkpointer.maybe_save(3, {})
            time.sleep(0.01)
    line = f"cannot save checkpoint {step_folder(tmp_path, 2)}: File too large; free some space"
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
    assert names(tmp_path) == ["step-1"] and run.checkpointer.finish() == 1


def test_save_past_its_limit_fails_and_leaves_its_folder_to_the_writer(tmp_path, disk):
    run = _run(tmp_path, save_timeout_seconds=1)
    _step(run, 1)
    with pytest.raises(RunError, match=r"on disk after checkpoint\.save_timeout_seconds=1: raise"):
        run.checkpointer.finish()
    assert names(tmp_path) == [".step-1.writing"]
    disk.set()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_folder_that_nodes_do_not_share_is_one_line(tmp_path, monkeypatch, mode):
    publish = folders.publish

    def publish_elsewhere(aside, *how):
        (aside / "__0_0.distcp").unlink()  # It is on the disk of another node.
        publish(aside, *how)

    monkeypatch.setattr(folders, "publish", publish_elsewhere)
    run = _run(tmp_path, async_mode=mode)
    with pytest.raises(RunError, match=r"__0_0.distcp is missing: it was removed, or job.dump"):
        _step(run, 1)
        run.checkpointer.finish()
    assert names(tmp_path) == []


def test_retention_happens_after_the_commit(tmp_path, monkeypatch):
    commit, seen = folders.commit, []

    def note(aside, target):
        seen.append(names(tmp_path))
        commit(aside, target)

    monkeypatch.setattr(folders, "commit", note)
    run = _run(tmp_path, keep_latest_k=1)
    for step in (1, 2):
        _step(run, step)
        run.checkpointer.finish()
    assert seen == [[".step-1.writing"], [".step-2.writing", "step-1"]]
    assert names(tmp_path) == ["step-2"]
