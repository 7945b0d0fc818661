"""Training steps of production code in one process, on random tokens."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.measure import usable_gpus
from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import IGNORE_INDEX, Batch
from titan_moe.models.registry import model_config
from titan_moe.parallelize.parallelize import ShardedModel
from titan_moe.runtime.device import backend_for, pick_device
from titan_moe.runtime.launch import Launch
from titan_moe.training.train_step import StepResult, TrainStep, build_step


def first_gpu_or_cpu(wanted: str | None = None) -> torch.device:
    """Returns the device of this name; left out: a GPU if there is one."""
    return torch.device("cpu") if wanted == "cpu" else pick_device(Launch(), usable_gpus())


@contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    """Sets up a process group of one rank, as a launcher would."""
    # Read when cuBLAS makes its first handle; deterministic steps want it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.HashStore()
    dist.init_process_group(backend_for(device), store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class Training:
    """A model, its optimizer and the batch that it repeats."""

    job: JobConfig
    sharded: ShardedModel
    optimizer: torch.optim.Optimizer
    step: TrainStep
    batch: Batch

    def run(self) -> StepResult:
        """Makes one step."""
        return self.step([self.batch])


def new_training(
    tables: dict[str, dict[str, Any]],
    device: torch.device,
    *,
    num_layers: int | None = None,
    seed: int = 0,
) -> Training:
    """Build as a run would; `num_layers` keeps the flavor's first layers alone."""
    job = JobConfig.model_validate(tables)
    config = model_config(job.model.name, job.model.flavor)
    config = replace(config, num_layers=num_layers or config.num_layers)
    sharded, optimizer, step = build_step(job, config, device=device)
    sharded.train(True)
    training = job.training
    batch = random_batch(training.local_batch_size, training.seq_len, config.vocab_size, seed)
    return Training(job, sharded, optimizer, step, batch)


def random_batch(num_rows: int, seq_len: int, vocab_size: int, seed: int = 0) -> Batch:
    """Returns tokens without meaning, one document a row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (num_rows, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, 0] = IGNORE_INDEX
    documents = torch.zeros(num_rows, seq_len, dtype=torch.int32)
    return Batch(tokens[:, :-1].contiguous(), labels, documents, [["random"]] * num_rows)


def why(error: Exception) -> str:
    """Returns an error's first line, for a table."""
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else repr(error)
