"""Weights at the start, the same in every layout; copies of one parameter, which stay alike."""

import json
from pathlib import Path

import pytest

from tests.support.trainings import make_job, train_here
from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.metrics.jsonl import INITIAL_WEIGHTS
from titan_moe.runtime.ranks import RankError, run_on_ranks


def job_of(folder: Path):
    return make_job(
        folder,
        steps=4,
        dtype="bfloat16",
        model={"name": "qwen3", "flavor": "gate"},
        training={"local_batch_size": 4},
        parallelism={"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
        checkpoint={"interval": 4},
    )


def train_untied(job) -> None:
    from titan_moe.training import train_step

    train_step.sum_tied_grads = lambda *_: None
    train_here(job)


@pytest.mark.slow
def test_copies_on_two_stages_stay_the_same_bits_in_bfloat16(tmp_path: Path):
    run_on_ranks(train_here, 4, job_of(tmp_path))
    sums = read_manifest(tmp_path / "checkpoint" / "step-4").checksums
    assert sums["model.output.weight"] == sums["model.tok_embeddings.weight"]


@pytest.mark.slow
def test_copies_that_drifted_are_not_saved(tmp_path: Path):
    line = "tok_embeddings.weight and its copies output.weight are not the same"
    with pytest.raises(RankError, match=line):
        run_on_ranks(train_untied, 4, job_of(tmp_path))
    assert not (tmp_path / "checkpoint" / "step-4").exists()


def recorded(folder: Path, ranks: int, seed: int = 0, **degrees: int) -> dict[str, str]:
    """Trains a step of a model with tied weights, and returns the checksums that it recorded."""
    job = make_job(
        folder,
        steps=1,
        model={"name": "qwen3", "flavor": "gate"},
        training={"local_batch_size": 2, "global_batch_size": 12},
        parallelism={f"{axis}_parallel_degree": size for axis, size in degrees.items()},
        metrics={"log_initial_weights": True},
        checkpoint={"enable": False},
        debug={"seed": seed},
    )
    run_on_ranks(train_here, ranks, job)
    found: dict[str, str] = json.loads((folder / INITIAL_WEIGHTS).read_text())
    return found


def test_checksums_of_initial_weights_are_the_same_in_any_layout(tmp_path: Path) -> None:
    """Three ranks of FSDP do not divide the dims, and get padding."""
    uneven = recorded(tmp_path / "uneven", 3)
    cut = recorded(tmp_path / "cut", 8, pipeline=2, tensor=2, expert=2, expert_tensor=2)
    assert len(uneven) > 20 and cut == uneven
    assert recorded(tmp_path / "other", 1, seed=1) != uneven
