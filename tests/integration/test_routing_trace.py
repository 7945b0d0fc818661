"""Routing records and replays of whole runs, as a user makes them."""

from pathlib import Path

import pytest

from tests.support.trainings import make_job, train_here
from titan_moe.debug.routing_record import Record
from titan_moe.runtime.ranks import run_on_ranks


@pytest.mark.slow
def test_resumed_run_continues_its_record(tmp_path: Path) -> None:
    record = tmp_path / "record"
    tables = {
        "debug": {"routing_record": str(record)},
        "checkpoint": {"enable": True, "interval": 1},
    }
    run_on_ranks(train_here, 1, make_job(tmp_path / "run", steps=2, **tables))
    first = (record / "step-2.rank-0-of-1.npz").read_bytes()
    # A step that is run again, as after a kill between its part and its checkpoint.
    (record / "step-3.rank-0-of-1.npz").write_bytes(b"")
    run_on_ranks(train_here, 2, make_job(tmp_path / "run", steps=3, **tables))
    steps = Record(record).steps
    assert {step: len(parts) for step, parts in steps.items()} == {1: 1, 2: 1, 3: 2}
    assert (record / "step-2.rank-0-of-1.npz").read_bytes() == first
