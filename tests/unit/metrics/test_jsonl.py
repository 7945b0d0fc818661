"""metrics.jsonl over kills, resumes and fresh starts."""

import json
import math

import pytest

from tests.support.saved_runs import full_disk
from titan_moe.metrics.jsonl import JsonLines, add_event, read_json_lines, set_events_aside


def write_steps(path, steps, *, resume_step=0):
    sink = JsonLines(path, resume_step=resume_step)
    for step in steps:
        sink.write(step, {"loss": step / 3})
    sink.close()


def steps_in(path):
    return [line["step"] for line in read_json_lines(path)]


def test_full_precision_and_one_object_a_line(tmp_path):
    path = tmp_path / "outputs" / "metrics.jsonl"
    sink = JsonLines(path, resume_step=0)
    sink.write(1, {"loss": 0.1 + 0.2, "moe/layers.1/cv": 1e-300, "grad_norm": math.inf})
    # Flushed: readable before the sink is closed.
    (line,) = path.read_text().splitlines()
    expected = {"step": 1, "loss": 0.1 + 0.2, "moe/layers.1/cv": 1e-300, "grad_norm": None}
    assert json.loads(line) == expected
    sink.close()


def test_a_full_disk_is_named_and_the_run_goes_on_from_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2])
    sink = JsonLines(path, resume_step=2)
    with full_disk(path.stat().st_size + 5), pytest.raises(OSError, match=str(path)):
        sink.write(3, {"loss": 1.0})
    sink.close()
    write_steps(path, [3], resume_step=2)
    assert steps_in(path) == [1, 2, 3]


def test_json_line_is_one_write(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl", resume_step=0)
    calls, file = [], sink._file
    counting = {"write": lambda _, x: calls.append(len(x)) or file.write(x)}
    sink._file = type("Counting", (), counting | {"close": lambda _: file.close()})()
    sink.write(1, {f"moe/layers.{number}/cv": 1.0 for number in range(5000)})
    sink.close()
    assert calls == [(tmp_path / "metrics.jsonl").stat().st_size] and calls[0] > 100_000


def test_resume_drops_what_will_be_run_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 8))
    before = path.read_text().splitlines()
    write_steps(path, range(6, 10), resume_step=5)
    assert steps_in(path) == list(range(1, 10))
    assert path.read_text().splitlines()[:7] == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("num_bytes_lost", range(1, 30))
def test_a_kill_at_any_byte_of_the_last_line_costs_that_line_at_most(tmp_path, num_bytes_lost):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 6))
    content = path.read_bytes()
    last_line = len(content.splitlines(keepends=True)[-1])
    path.write_bytes(content[:-num_bytes_lost])
    # Only the line end is gone: the object is whole.
    survivors = [1, 2, 3, 4, 5] if num_bytes_lost == 1 else [1, 2, 3, 4]
    assert num_bytes_lost < last_line
    assert steps_in(path) == survivors
    write_steps(path, [6], resume_step=5)
    assert steps_in(path) == [*survivors, 6]


def test_lines_of_others_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    foreign = b'# a note\r\n\xff\xfe\n\n[3]\n{"note": "no step"}\n'
    path.write_bytes(foreign + b'{"step": 1}\n{"step": 9}\n')
    write_steps(path, [], resume_step=4)
    assert path.read_bytes() == foreign + b'{"step": 1}\n'


def test_a_fresh_start_sets_an_older_run_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for last in (2, 3, 4):
        write_steps(path, range(1, last + 1))
    assert steps_in(path) == [1, 2, 3, 4]
    assert steps_in(tmp_path / "metrics.1.jsonl") == [1, 2]
    assert steps_in(tmp_path / "metrics.2.jsonl") == [1, 2, 3]


def test_events_are_only_added(tmp_path):
    path = tmp_path / "events.jsonl"
    add_event(tmp_path, 18, {"decision": "skip", "loss": math.nan})
    add_event(tmp_path, 17, {"decision": "skip"})
    path.write_bytes(path.read_bytes() + b'{"step": 3')  # Torn by a kill.
    set_events_aside(tmp_path, resume_step=5)
    add_event(tmp_path, 9, {"decision": "stop"})
    assert read_json_lines(path)[0] == {"step": 18, "decision": "skip", "loss": None}
    assert steps_in(path) == [18, 17, 9] and path.read_bytes().count(b"\n") == 3
    # A run that begins anew does not keep them.
    set_events_aside(tmp_path, resume_step=0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["events.1.jsonl"]
