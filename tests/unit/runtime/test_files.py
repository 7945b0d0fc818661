"""Files that others read while a run writes them: always whole, the old content or the new."""

import errno

import pytest

from titan_moe.metrics.jsonl import JsonLines
from titan_moe.runtime.files import replacing, write_whole


def test_replacing_keeps_the_old_content_after_an_error(tmp_path):
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as aside:
        aside.write_text("new")
        assert aside.suffix == ".txt" and path.read_text() == "old"
        _ = 1 / 0
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_replacing_names_the_file_of_a_failed_write(tmp_path):
    with pytest.raises(OSError, match=str(tmp_path / "a.txt")), replacing(tmp_path / "a.txt"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_json_line_is_one_write(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl", resume_step=0)
    calls, file = [], sink._file
    counting = {"write": lambda _, x: calls.append(len(x)) or file.write(x)}
    sink._file = type("Counting", (), counting | {"close": lambda _: file.close()})()
    sink.write(1, {f"moe/layers.{number}/cv": 1.0 for number in range(5000)})
    sink.close()
    assert calls == [(tmp_path / "metrics.jsonl").stat().st_size] and calls[0] > 100_000
