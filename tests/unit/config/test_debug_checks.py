"""Routing traces and captures: folders and steps that cannot be meant get one line."""

from pathlib import Path

from tests.support.config_checks import noted, problems


def test_routing_traces(tmp_path: Path) -> None:
    full, record = tmp_path / "full", tmp_path / "record"
    for folder, name in ((full, "notes.txt"), (record, "record.json")):
        folder.mkdir()
        (folder / name).touch()
    (line,) = problems(f"--debug.routing_record {full}")
    assert line == f"debug.routing_record={full} holds other files: choose a new folder"
    (line,) = problems(f"--debug.routing_record {full}/notes.txt")
    assert "notes.txt holds other files" in line
    (line,) = problems(f"--debug.routing_replay {tmp_path}/none")
    assert "routing_replay" in line and "has no record.json: name the folder of a" in line
    (line,) = problems(f"--debug.routing_replay {record} --debug.routing_record {full}/../record")
    assert "is what is replayed: choose another folder" in line
    (line,) = problems(f"--debug.routing_replay {record} --debug.moe_force_load_balance")
    assert "both say where tokens go: choose one" in line
    lines = problems(f"--debug.routing_replay {record} --debug.routing_record new", moe=False)
    assert [line.partition("=")[0] for line in lines] == [
        "debug.routing_record",
        "debug.routing_replay",
    ]
    assert all("deepseek_v3 debugmodel has no experts; leave it out" in line for line in lines)
    assert problems(f"--debug.routing_record {tmp_path}/new --debug.routing_replay {record}") == []
    assert problems(f"--debug.routing_record {record}") == []


def test_a_cpu_has_no_communicators_to_make() -> None:
    (line,) = noted("--comm.init_communicators_eagerly")
    assert line.startswith("comm.init_communicators_eagerly=true has no effect on a CPU")
    assert noted("--comm.init_communicators_eagerly", gpus=2) == []


def test_a_capture_is_of_a_step_of_the_run() -> None:
    (line,) = noted("--debug.capture_step 9 --training.steps 8")
    assert line == "debug.capture_step=9 has no effect: it is beyond training.steps=8"
    assert noted("--debug.capture_step 8 --training.steps 8") == []
