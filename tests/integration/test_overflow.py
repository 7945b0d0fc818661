"""Bounded buffers that do not suffice stop a run in one line, or cost what the metrics say."""

from pathlib import Path

import pytest

from tests.support.trainings import make_job, train_here
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.ranks import RankError, run_on_ranks

EP2 = {"expert_parallel_degree": 2}
NARROW = {**EP2, "expert_parallel_capacity_factor": 0.9}


def test_a_run_stops_before_the_update(tmp_path: Path):
    job = make_job(tmp_path, parallelism=NARROW)
    with pytest.raises(RankError) as failure:
        run_on_ranks(train_here, 2, job)
    message = str(failure.value)
    assert "step 1: " in message and "no state was kept" in message
    assert "parallelism.expert_parallel_capacity_factor=0.9: choose a larger one" in message
    assert not read_json_lines(tmp_path / "metrics.jsonl")


@pytest.mark.slow
def test_what_is_dropped_is_told_and_training_goes_on(tmp_path: Path):
    drop = {**NARROW, "expert_parallel_overflow": "drop"}
    run_on_ranks(train_here, 2, make_job(tmp_path, parallelism=drop))
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    # At least what no routing at all could fit in.
    assert all(0.09 < line["dispatch/dropped"] < 0.5 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.slow
def test_buffers_that_suffice_are_exact_and_say_nothing(tmp_path: Path):
    wide = {**EP2, "expert_parallel_capacity_factor": 1.99}
    for folder, parallelism in (("wide", wide), ("exact", EP2)):
        run_on_ranks(train_here, 2, make_job(tmp_path / folder, parallelism=parallelism))
    files = (tmp_path / folder / "metrics.jsonl" for folder in ("wide", "exact"))
    ours, theirs = map(read_json_lines, files)
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]
    assert not any("dispatch/dropped" in line for line in ours)
