"""Where a run goes on in its data."""

from types import SimpleNamespace

import pytest
import torch

from titan_moe.config.job_config import JobConfig
from titan_moe.config.stages import job_of_step
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.errors import RunError
from titan_moe.train_data import TrainData


def test_a_run_that_has_left_out_data_is_in_the_stage_of_its_step() -> None:
    """Of a position after step 5 and batch 7, where the second stage begins with step 6."""
    job = JobConfig(
        model={"name": "deepseek_v3", "flavor": "2M", "tokenizer_path": "bytes"},
        training={
            "dataset": "synthetic",
            "seq_len": 64,
            "local_batch_size": 2,
            "global_batch_size": 2,
        },
        stages=[{"from_step": 6, "seq_len": 32}],
    )
    process = SimpleNamespace(device=torch.device("cpu"), rank=0, world_size=1, is_main=True)
    dims = SimpleNamespace(coordinate=lambda rank, axis: 0, size=lambda axis: 1)
    first, second = (TrainData(job, model_of_job(job.model), process) for _ in range(2))
    first.open(job_of_step(job, 1), dims)
    for _ in range(7):
        first.loader.next_step()
    state = first.loader.state_dict()
    first.close()
    second.open(job_of_step(job, 6), dims)
    with pytest.raises(RunError, match="seq_len"):
        second.load_state(state)
    second.load_state(state, 5)
    (batch,) = second.loader.next_step()
    assert batch.tokens_BS.shape == (2, 32)
    second.close()


def test_an_error_names_the_step_of_the_run_and_the_batch_of_the_data() -> None:
    """After batch 7, of data whose disk fails then; a run that went back is at step 5."""
    job = JobConfig(
        model={"name": "deepseek_v3", "flavor": "2M", "tokenizer_path": "bytes"},
        training={
            "dataset": "synthetic",
            "seq_len": 64,
            "local_batch_size": 2,
            "global_batch_size": 2,
        },
    )
    process = SimpleNamespace(device=torch.device("cpu"), rank=0, world_size=1, is_main=True)
    dims = SimpleNamespace(coordinate=lambda rank, axis: 0, size=lambda axis: 1)
    data = TrainData(job, model_of_job(job.model), process)
    data.open(job, dims)
    for step in range(1, 8):
        data.next_step(step)
    reader = data.loader._reader
    data.loader.load_state_dict(data.loader.state_dict())  # What was read ahead is read again.
    for stream in reader._streams:
        stream.next_sequence = _fail
    with pytest.raises(RunError, match=r"^step 8: reading the dataset .* failed: OSError: I/O"):
        data.next_step(8)
    with pytest.raises(RunError, match=r"^step 6, batch 8 of the data with those .*: reading the"):
        data.next_step(6)
    data.close()


def _fail() -> None:
    raise OSError("I/O")
