"""TrainData goes on at a checkpoint's position, and counts documents without a text."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.documents import write_jsonl
from titan_moe.config.job_config import JobConfig
from titan_moe.config.training_stages import job_of_step
from titan_moe.data.reader import documents_without_text
from titan_moe.models.hf import model_of_job
from titan_moe.train_data import TrainData

PROCESS = SimpleNamespace(device=torch.device("cpu"), rank=0, world_size=1, is_main=True)
DIMS = SimpleNamespace(coordinate=lambda rank, axis: 0, size=lambda axis: 1)


def job_of(stages: tuple = (), **training: Any) -> JobConfig:
    batch = {"seq_len": 64, "local_batch_size": 2, "global_batch_size": 2}
    return JobConfig(
        model={"name": "deepseek_v3", "flavor": "2M", "tokenizer_path": "bytes"},
        training={"dataset": "synthetic", **batch, **training},
        stages=list(stages),
    )


def data_of(job: JobConfig) -> TrainData:
    return TrainData(job, model_of_job(job.model), PROCESS)


def test_documents_without_a_text_are_counted_across_a_resume_in_another_stage(
    tmp_path: Path,
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [None, "a", "b", "c"])
    job = job_of(
        ({"from_step": 3, "global_batch_size": 4, "local_batch_size": 4},),
        dataset="json",
        dataset_path=path,
        repeat_dataset=True,
        seq_len=4,
    )
    data, later = data_of(job), data_of(job)
    data.open(job_of_step(job, 1), DIMS)
    for _ in range(2):
        data.loader.next_step()
    counted = documents_without_text(data.loader.state_dict())
    later.open(job_of_step(job, 3), DIMS)
    later.load_state(data.loader.state_dict())
    assert documents_without_text(later.loader.state_dict()) == counted > 0
    later.loader.next_step()
    assert documents_without_text(later.loader.state_dict()) > counted
    data.loader.close()
    later.loader.close()
