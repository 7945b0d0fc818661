import json
import os
import re

import pytest

from titan_moe.checkpoint import storage
from titan_moe.runtime.errors import RunError


def _save(folder, step, text="x"):
    target = storage.step_folder(folder, step)
    aside = storage.begin(target)
    storage.write_json(aside / "a.json", {"text": text})
    storage.commit(aside, target)
    return target


def test_a_save_is_invisible_until_committed(tmp_path):
    _save(tmp_path, 1)
    storage.begin(storage.step_folder(tmp_path, 2))  # Killed here.
    assert storage.saved_steps(tmp_path) == [1]
    _save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]


def test_half_removed_checkpoints_are_invisible_and_cleared(tmp_path):
    _save(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / ".step-1.deleting")
    assert storage.saved_steps(tmp_path) == []
    _save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_strange_neighbours_are_left_alone(tmp_path):
    (tmp_path / "step-7").write_text("a file")
    (tmp_path / "step-x").mkdir()
    (tmp_path / ".step-7.writing-down").mkdir()
    _save(tmp_path, 2)
    assert storage.saved_steps(tmp_path) == [2]
    assert len(list(tmp_path.iterdir())) == 4


def test_saving_a_step_again_replaces_it(tmp_path):
    _save(tmp_path, 1, "old")
    assert storage.read_json(_save(tmp_path, 1, "new") / "a.json") == {"text": "new"}


def test_keep_latest_counts_numbers_not_names_or_times(tmp_path):
    for step in (9, 10, 100):
        # Nor times of modification, which hosts that share a folder do not agree on.
        os.utime(_save(tmp_path, step), (1000 - step, 1000 - step))
    storage.keep_latest(tmp_path, count=2, newest=100)
    assert storage.saved_steps(tmp_path) == [10, 100]
    storage.keep_latest(tmp_path, count=1, newest=10)  # 100 is of a branch that was left.
    assert storage.saved_steps(tmp_path) == [10, 100]


@pytest.mark.parametrize("text", [None, "", "{", "[1]", json.dumps("x")])
def test_unreadable_json_is_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with pytest.raises(RunError, match=re.escape("a.json")) as caught:
        storage.read_json(tmp_path / "a.json")
    assert "\n" not in str(caught.value)
