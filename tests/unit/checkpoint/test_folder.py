import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from titan_moe.checkpoint import folder as folders
from titan_moe.runtime.errors import RunError


def _write(folder: Path, step: int, text: str = "x") -> Path:
    """A checkpoint with two files, not yet committed."""
    aside = folders.begin(folders.step_folder(folder, step))
    for name in ("a.txt", "b.txt"):
        (aside / name).write_text(text)
    return aside


def _save(folder: Path, step: int, text: str = "x") -> Path:
    target = folders.step_folder(folder, step)
    folders.commit(_write(folder, step, text), target)
    return target


def test_half_removed_checkpoints_are_invisible_and_cleared(tmp_path):
    _save(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / ".step-1.deleting")
    assert folders.saved_steps(tmp_path) == []
    _save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


class Killed(BaseException):
    """Ends what a process does, as SIGKILL would: no handler of errors sees it."""


@contextmanager
def failing_at(call: int, error: BaseException) -> Iterator[None]:
    """Let a change of a folder, or a wait for the disk, fail: the call of this number."""
    places = [(Path, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir")]
    calls = 0

    def counted(function):
        def count(*args, **keys):
            nonlocal calls
            calls += 1
            if calls == call:
                raise error
            return function(*args, **keys)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield


@pytest.mark.parametrize("error", [Killed(), OSError("no space left")])
def test_no_checkpoint_is_lost_when_a_save_of_the_same_step_fails(tmp_path, error):
    found = []
    for call in range(1, 20):
        folder = tmp_path / str(call)
        target, aside = _save(folder, 1, "old"), _write(folder, 1, "new")
        try:
            with failing_at(call, error):
                folders.commit(aside, target)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
        except Killed:
            pass
        else:
            break
        kept = [path for path in folder.glob("step-*") if (path / "a.txt").read_text() == "old"]
        assert [path.name for path in kept] in (["step-1"], ["step-1.abandoned-1"]), call
        found += [(target / "b.txt").read_text() if target.exists() else "none"]
        _save(folder, 2)
        names = {path.name for path in folder.iterdir()}
        assert names <= {"step-1", "step-1.abandoned-1", "step-2"}, call
    order = ["old", "none", "new"]
    assert found == sorted(found, key=order.index) and set(found) == {*order}
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-1.abandoned-1"]


def test_a_second_writer_of_a_new_folder_is_refused_and_does_no_harm(world_of_one, tmp_path):
    target = tmp_path / "new"
    with folders.new_folder(target, 0, doing="cannot export") as aside:
        (aside / "a").write_text("a")
        second = folders.new_folder(target, 0, doing="cannot export")
        with pytest.raises(RunError, match=r"new.writing is in use by process .*choose another"):
            second.__enter__()
    assert (target / "a").read_text() == "a"


def test_keep_latest_counts_numbers_not_names_or_times(tmp_path):
    for step in (0, 9, 10, 100):  # 0 is a seed checkpoint, which stays.
        # Nor times of modification, which hosts that share a folder do not agree on.
        os.utime(_save(tmp_path, step), (1000 - step, 1000 - step))
    folders.keep_latest(tmp_path, count=2, newest=100)
    assert folders.saved_steps(tmp_path) == [0, 10, 100]
    folders.keep_latest(tmp_path, count=1, newest=10)  # 100 is of a branch that was left.
    assert folders.saved_steps(tmp_path) == [0, 10, 100]
