"""Checksums of initial weights, by which runs without a seed checkpoint are compared."""

import json
from pathlib import Path

from tests.support.trainings import make_job, train_here
from titan_moe.metrics.jsonl import INITIAL_WEIGHTS
from titan_moe.runtime.ranks import run_on_ranks


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
