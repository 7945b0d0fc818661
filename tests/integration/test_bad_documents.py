"""A run counts the documents that it cannot read, each once, in whatever layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainings import make_job, train_here
from titan_moe.runtime.ranks import run_on_ranks


def counted(folder: Path, world_size: int, parallelism: dict[str, Any]) -> list[int]:
    """By step, of a run on texts of which every third one is a number."""
    folder.mkdir()
    texts = [number if number % 3 == 0 else 20 * f"{number} " for number in range(60)]
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"dataset": "json", "dataset_path": str(path), "max_bad_documents": 1.0}
    job = make_job(
        folder,
        steps=3,
        training=data | {"repeat_dataset": True},
        parallelism=parallelism,
        checkpoint={"enable": False},
    )
    run_on_ranks(train_here, world_size, job)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line).get("data/bad_documents", 0) for line in lines]


@pytest.mark.slow
def test_ranks_that_read_the_same_count_it_once(tmp_path: Path) -> None:
    alone = counted(tmp_path / "alone", 1, {})
    assert 0 < alone[-1] < 60
    assert counted(tmp_path / "pair", 2, {"tensor_parallel_degree": 2}) == alone
