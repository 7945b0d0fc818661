"""Files that others read while a run writes them: always whole, the old content or the new."""

import errno
import json
import multiprocessing
from pathlib import Path

import pytest

from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import save_job
from titan_moe.metrics.curves import plot_curves
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


def poll(folder: Path, found) -> None:
    """Reads all that is there, again and again; sends the first thing that is not whole."""
    seen: dict[str, int] = {}
    while not (folder / "end").exists():
        for path in [path for path in folder.iterdir() if path.name[0] != "."]:
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue
            seen[path.name] = seen.get(path.name, 0) + 1
            if problem := not_whole(path, content):
                found.send(problem)
                return
    found.send(seen)


def not_whole(path: Path, content: bytes) -> str:
    if path.suffix == ".jsonl":
        *lines, _ = content.split(b"\n")
        steps = [json.loads(line)["step"] for line in lines]
        return "" if steps == list(range(1, len(steps) + 1)) else f"steps {steps}"
    ends = {".json": b"}", ".toml": b"\n", ".png": b"IEND\xaeB`\x82"}
    return "" if content.endswith(ends.get(path.suffix, b"")) and content else f"half {path.name}"


def test_polling_reader_sees_whole_files(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    reader = multiprocessing.get_context("fork").Process(target=poll, args=(folder, theirs))
    reader.start()
    metrics = JsonLines(folder / "metrics.jsonl", resume_step=0)
    for step in range(1, 121):
        metrics.write(step, {"loss": 1.0, "grad_norm": 2.0, "lr": 1e-3} | {"x" * 900: 1.0})
        write_whole(folder / "run.json", json.dumps({"text": "x" * 1_000_000}))
        save_job(JobConfig(), folder / "config.toml")
        if step % 60 == 0:
            png = folder / "curves.png"
            plot_curves(folder / "metrics.jsonl", png, title="", unit="byte", uniform_loss=5.5)
    (folder / "end").touch()
    found = ours.recv()
    reader.join()
    assert isinstance(found, dict), found
    assert {"metrics.jsonl", "run.json", "config.toml", "curves.png"} <= found.keys()
    assert min(found[name] for name in ("metrics.jsonl", "run.json", "config.toml")) > 10


def test_json_line_is_one_write(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl", resume_step=0)
    calls, file = [], sink._file
    counting = {"write": lambda _, x: calls.append(len(x)) or file.write(x)}
    sink._file = type("Counting", (), counting | {"close": lambda _: file.close()})()
    sink.write(1, {f"moe/layers.{number}/cv": 1.0 for number in range(5000)})
    sink.close()
    assert calls == [(tmp_path / "metrics.jsonl").stat().st_size] and calls[0] > 100_000
