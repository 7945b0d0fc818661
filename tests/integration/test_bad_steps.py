"""Spikes and NaN by policy: each policy gives a run that can be made by hand, and ranks agree."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainings import (
    assert_same_run,
    checksums,
    figures,
    make_job,
    train_here,
    train_leaving_out_update,
    train_with_faults,
)
from titan_moe.config.job_config import JobConfig
from titan_moe.metrics.jsonl import EVENTS, read_json_lines
from titan_moe.runtime.ranks import RankError, run_on_ranks

STEPS = 8


def job_of(folder: Path, policy: str, *, steps: int = STEPS, **tables: Any) -> JobConfig:
    training = {"spike_factor": 10, "on_spike": policy, "on_nonfinite": policy}
    training |= tables.pop("training", {})
    checkpoint = {"enable": True, "interval": 2, **tables.pop("checkpoint", {})}
    metrics = {"log_freq": 1, "log_expert_counts": True}
    return make_job(
        folder, steps=steps, training=training, checkpoint=checkpoint, metrics=metrics, **tables
    )


def events(folder: Path) -> list[dict[str, Any]]:
    return read_json_lines(folder / EVENTS)


def assert_same(ours: Path, theirs: Path) -> None:
    assert_same_run(ours, theirs, STEPS)
    counts = [(folder / "expert_counts.jsonl").read_text() for folder in (ours, theirs)]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_run_killed_after_a_skip_resumes_as_if_undisturbed(tmp_path: Path):
    """The kill comes in step 7, after a save of the norms that the second fault is judged by."""
    faults = {5: "nan", 7: "spike"}
    job, undisturbed = (job_of(tmp_path / name, "skip") for name in ("killed", "undisturbed"))
    with pytest.raises(RankError):
        run_on_ranks(partial(train_with_faults, kill_in=7), 2, job, faults)
    assert (tmp_path / "killed/checkpoint/step-6").exists()
    for each in (job, undisturbed):
        run_on_ranks(train_with_faults, 2, each, faults)
    assert_same(tmp_path / "killed", tmp_path / "undisturbed")
    for name in ("killed", "undisturbed"):
        nan, spike = events(tmp_path / name)
        assert (nan["step"], nan["event"], nan["loss"]) == (5, "nonfinite", None)
        assert "output of layers.1.moe.experts on rank 1" in nan["line"]
        assert (spike["step"], spike["event"]) == (7, "spike")
        assert spike["grad_norm"] > 10 * spike["median_grad_norm"] > 0


@pytest.mark.slow
def test_skipping_leaves_out_one_update(tmp_path: Path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run_on_ranks(train_with_faults, 2, job_of(ours, "skip"), {6: "spike"})
    run_on_ranks(train_leaving_out_update, 2, job_of(theirs, "stop"), 6)
    assert checksums(ours, STEPS) == checksums(theirs, STEPS)
    (event,) = events(ours)
    assert (event["step"], event["decision"]) == (6, "skip")
    unlike = [a[0] for a, b in zip(figures(ours), figures(theirs), strict=True) if a != b]
    assert unlike == [6], "the norm with the fault"
    # The spike is not among the norms that later ones are judged by.
    kept = [
        json.loads((folder / "checkpoint/step-8/train_state.json").read_text())
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
