"""Routing records and replays of whole runs, as a user makes them."""

from pathlib import Path

import pytest

from tests.support.launching import run_train
from tests.support.trainings import make_job, train_here
from titan_moe.debug.routing_trace import FLIPS_FILE, Record
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.ranks import run_on_ranks


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_json_lines(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_run_follows_the_record_of_another(tmp_path: Path) -> None:
    record, again = tmp_path / "record", tmp_path / "again"
    validated = {"validation__enable": True, "validation__freq": 1, "validation__steps": 1}
    batch = {"training__global_batch_size": 4}
    run = run_train(tmp_path / "a", debug__routing_record=record, **batch, **validated)
    assert run.returncode == 0, run.stderr
    run = run_train(
        tmp_path / "b",
        {"NGPU": 2},
        debug__routing_replay=record,
        debug__routing_record=again,
        debug__permute_rows=5,
        parallelism__expert_parallel_degree=2,
        **batch,
    )
    assert run.returncode == 0, run.stderr
    assert len(read_json_lines(tmp_path / "b" / FLIPS_FILE)) == 2
    ours, theirs = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert all(abs(a - b) < 1e-5 for a, b in zip(ours, theirs, strict=True))

    run = run_train(tmp_path / "c", debug__routing_replay=record, training__steps=3, **batch)
    assert run.returncode == 2
    assert f"debug.routing_replay={record} lacks step 3 of training.steps=3" in run.stderr
    assert not (tmp_path / "c" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_resumed_run_continues_its_record(tmp_path: Path) -> None:
    record = tmp_path / "record"
    tables = {
        "debug": {"routing_record": str(record)},
        "checkpoint": {"enable": True, "interval": 1},
    }
    run_on_ranks(train_here, 1, make_job(tmp_path / "run", steps=2, **tables))
    first = (record / "step-2.rank-0-of-1.npz").read_bytes()
    # Of a step that is run again, as after a kill between its part and its checkpoint.
    (record / "step-3.rank-0-of-1.npz").write_bytes(b"")
    run_on_ranks(train_here, 2, make_job(tmp_path / "run", steps=3, **tables))
    steps = Record(record).steps
    assert {step: len(parts) for step, parts in steps.items()} == {1: 1, 2: 1, 3: 2}
    assert (record / "step-2.rank-0-of-1.npz").read_bytes() == first
