"""Spikes and NaN by policy: each policy gives a run that can be made by hand, and ranks agree."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.faulty_steps import (
    train_in_legs,
    train_leaving_out_update,
    train_with_faults,
)
from tests.support.tiers import tiered
from tests.support.trainings import figures, make_job, train_here
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import RankError, run_on_ranks

STEPS = 8
TWO_FAULTS = {6: "nan", 10: "spike"}
"""By batch: the run goes back from step 6 to 4, and on with batch 7; then from step 8, which has
batch 10, to 6, and on with batch 11."""


def job_of(folder: Path, policy: str, *, steps: int = STEPS, **tables: Any) -> JobConfig:
    training = {"spike_factor": 10, "on_spike": policy, "on_nonfinite": policy}
    training |= tables.pop("training", {})
    checkpoint = {"enable": True, "interval": 2, **tables.pop("checkpoint", {})}
    metrics = {"log_freq": 1, "log_expert_counts": True}
    return make_job(
        folder, steps=steps, training=training, checkpoint=checkpoint, metrics=metrics, **tables
    )


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def checksums(folder: Path) -> dict[str, Any]:
    manifest = folder / f"checkpoint/step-{STEPS}/manifest.json"
    return json.loads(manifest.read_text())["checksums"]


def assert_same(ours: Path, theirs: Path) -> None:
    assert [line[0] for line in figures(ours)] == list(range(1, STEPS + 1))
    assert figures(ours) == figures(theirs)
    assert checksums(ours) == checksums(theirs)
    counts = [(folder / "expert_counts.jsonl").read_text() for folder in (ours, theirs)]
    assert counts[0] == counts[1]


def roll_back_by_hand(folder: Path, **tables: Any) -> None:
    """The run of TWO_FAULTS, by resuming from its checkpoints further on in the data."""
    legs = [(4, 0), (6, 2), (STEPS, 2)]
    jobs = [(job_of(folder, "stop", steps=steps, **tables), skipped) for steps, skipped in legs]
    run_on_ranks(train_in_legs, 2, jobs)


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rolled_back")
    run_on_ranks(train_with_faults, 2, job_of(folder, "roll_back"), TWO_FAULTS)
    return folder


def test_roll_back_is_resuming_further_on_in_the_data(tmp_path: Path, rolled_back: Path):
    roll_back_by_hand(tmp_path)
    assert_same(rolled_back, tmp_path)
    first, second = events(rolled_back)
    assert (first["step"], first["event"], first["checkpoint"]) == (6, "nonfinite", 4)
    assert "output of layers.1.moe.experts on rank 1" in first["line"]
    assert (second["step"], second["event"], second["checkpoint"]) == (8, "spike", 6)
    assert second["grad_norm"] > 10 * second["median_grad_norm"] > 0
    assert first["loss"] is None and second["loss"] > 0
    assert not (tmp_path / "events.jsonl").exists()


@pytest.mark.parametrize(
    "kill_in, num_events",
    # In step 7, after a save that has the place in the data and the norms that the second fault is
    # judged by; or in step 6, made again, before that save: the run meets the first fault anew.
    tiered([], slow=[(9, 2), (8, 3)]),
)
def test_run_killed_after_a_roll_back_resumes_as_if_undisturbed(
    tmp_path: Path, rolled_back: Path, kill_in: int, num_events: int
):
    job = job_of(tmp_path, "roll_back")
    with pytest.raises(RankError):
        run_on_ranks(partial(train_with_faults, kill_in=kill_in), 2, job, TWO_FAULTS)
    assert (tmp_path / "checkpoint/step-6").exists() == (kill_in == 9)
    run_on_ranks(train_with_faults, 2, job, TWO_FAULTS)
    assert_same(tmp_path, rolled_back)
    assert len(events(tmp_path)) == num_events


@pytest.mark.parametrize(
    "tables",
    tiered(
        [],
        slow=[
            {"parallelism": {"pipeline_parallel_degree": 2}},
            {"checkpoint": {"async_mode": "async"}},
        ],
        full=[{"parallelism": {"expert_parallel_degree": 2}}],
    ),
)
def test_roll_back_in_other_layouts_and_with_saves_in_the_background(
    tmp_path: Path, tables: dict[str, Any]
):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run_on_ranks(train_with_faults, 2, job_of(ours, "roll_back", **tables), TWO_FAULTS)
    roll_back_by_hand(theirs, **tables)
    assert_same(ours, theirs)


@pytest.mark.slow
def test_skipping_leaves_out_one_update(tmp_path: Path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run_on_ranks(train_with_faults, 2, job_of(ours, "skip"), {6: "spike"})
    run_on_ranks(train_leaving_out_update, 2, job_of(theirs, "stop"), 6)
    assert checksums(ours) == checksums(theirs)
    (event,) = events(ours)
    assert (event["step"], event["decision"], event["checkpoint"]) == (6, "skip", None)
    unlike = [a[0] for a, b in zip(figures(ours), figures(theirs), strict=True) if a != b]
    assert unlike == [6], "the norm with the fault"
    # The spike is not among the norms that later ones are judged by.
    kept = [
        json.loads((folder / "checkpoint/step-8/train_state.json").read_text())["common"]
        for folder in (ours, theirs)
    ]
    norms = [state["bad_steps"]["norms"] for state in kept]
    assert len(norms[0]) == 7 and norms[0] == norms[1][:5] + norms[1][6:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("spike", "a spike: gradient norm "),
        ("nan", "first seen in the output of layers.1.moe.experts on rank 1; the state"),
        ("gradient", "first seen in the gradient of output.weight; the state"),
    ],
)
def test_run_stops_with_the_state_before_the_bad_step(tmp_path: Path, fault: str, seen: str):
    job = job_of(tmp_path, "stop")
    with pytest.raises(RankError) as failure:
        run_on_ranks(train_with_faults, 2, job, {6: fault})
    message = str(failure.value)
    assert "step 6: " in message and seen in message and "checkpoint/step-5 (" in message
    assert (tmp_path / "checkpoint/step-5/manifest.json").exists(), "between two saves"
    assert [event["decision"] for event in events(tmp_path)] == ["stop"]
    # Going on from there without the fault is the run that never had it.
    run_on_ranks(train_here, 2, job)
    healthy = tmp_path / "healthy"
    run_on_ranks(train_here, 2, job_of(healthy, "stop"))
    assert_same(tmp_path, healthy)
