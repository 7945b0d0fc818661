"""Training steps of production code in this one process, for the GPU benchmarks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import IGNORE_INDEX, Batch
from titan_moe.distributed.parallelize import build_sharded_model
from titan_moe.models.config import ModelConfig
from titan_moe.models.registry import model_config
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.runtime.device import backend_for
from titan_moe.train_step import StepResult, TrainStep


@contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    """What a launcher would set up, for one rank."""
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
    """A model, its optimizer and the batches that it repeats."""

    step: TrainStep
    batch: Batch
    parameters: list[nn.Parameter]
    config: ModelConfig

    def run(self) -> StepResult:
        return self.step([self.batch])

    def checksums(self) -> list[float]:
        """A number of each parameter; equal numbers stand for equal bits."""
        return [float(_local(p).double().sum()) for p in self.parameters]


def new_training(
    tables: dict[str, dict[str, Any]], device: torch.device, num_layers: int | None = None
) -> Training:
    """Build as `titan_moe.train` would; `num_layers` keeps the flavor's first layers alone."""
    job = JobConfig.model_validate(tables)
    config = model_config(job.model.name, job.model.flavor)
    if num_layers is not None:
        config = replace(config, num_layers=num_layers)
    sharded = build_sharded_model(job, config, device=device, world_size=1)
    sharded.train(True)
    named = list(sharded.named_parameters())
    optimizer = build_optimizer(job.optimizer, named)
    step = TrainStep(sharded, optimizer, job.training, device=device)
    rows, seq_len = job.training.local_batch_size, job.training.seq_len
    batch = random_batch(rows, seq_len, config.vocab_size)
    return Training(step, batch, [p for _, p in named], config)


def random_batch(num_rows: int, seq_len: int, vocab_size: int) -> Batch:
    """Tokens without meaning, one document a row."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (num_rows, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, 0] = IGNORE_INDEX
    documents = torch.zeros(num_rows, seq_len, dtype=torch.int32)
    return Batch(tokens[:, :-1].contiguous(), labels, documents, [["random"]] * num_rows)


def _local(parameter: nn.Parameter) -> Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
