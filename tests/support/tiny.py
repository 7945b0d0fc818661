"""A configuration of a tiny model, and rows for it, for tests of parts of a step."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import model_of_job
from titan_moe.parallelize.parallelize import ShardedModel
from titan_moe.training.train_step import Observer, TrainStep, build_step

ROWS, SEQ_LEN = 24, 32
COMMON = {
    "training": {"dtype": "float64", "local_batch_size": 1, "seq_len": SEQ_LEN, "max_norm": 0.3},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.3},
    "moe": {
        "row_alignment": 16,
        "bias_update_speed": 0.05,
        "sequence_aux_loss_weight": 0.01,
        "global_aux_loss_weight": 0.02,
        "z_loss_weight": 0.003,
    },
    "activation_checkpoint": {"mode": "none"},
}
FAMILIES = {"deepseek_v3": "2M", "qwen3": "debugmodel_moe"}


def tiny(job: JobConfig) -> ModelConfig:
    """A family's debug model, smaller."""
    config = model_of_job(job.model)
    assert config.moe is not None
    moe = replace(config.moe, hidden_dim=48)
    return replace(config, vocab_size=96, dim=64, num_layers=3, hidden_dim=96, moe=moe)


def make_job(family: str, **tables: dict) -> JobConfig:
    """The common tables with these on top."""
    tables["model"] = {"name": family, "flavor": FAMILIES[family]}
    merged = {**COMMON, **{key: {**COMMON.get(key, {}), **table} for key, table in tables.items()}}
    return JobConfig.model_validate(merged)


def tiny_step(
    job: JobConfig, config: ModelConfig | None = None, device: str = "cpu"
) -> tuple[ShardedModel, TrainStep]:
    """Builds a job's tiny model, or another one, on this rank, and its step."""
    sharded, _, step = build_step(job, config or tiny(job), device=torch.device(device))
    return sharded, step


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def largest_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Returns the largest relative error of a gradient."""
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


class FirstGradients(Observer):
    """An observer that keeps the gradients of a model's first step."""

    def __init__(self, sharded: ShardedModel, part: Callable[[Tensor], Tensor] = whole) -> None:
        self._parameters = {n: p for n, p in sharded.named_parameters() if p.requires_grad}
        self._part = part
        self.found: dict[str, Tensor] = {}

    def accumulated(self) -> None:
        if not self.found:
            for name, parameter in self._parameters.items():
                self.found[name] = self._part(parameter.grad).clone()


def batch_of(step: int, rows: slice) -> Batch:
    """Returns some rows of a global batch, which differ in the number of targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 96, (ROWS, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : 2 * row % 19] = -100
    ends = torch.randint(3, SEQ_LEN, (ROWS, 1), generator=generator)
    documents = (torch.arange(SEQ_LEN) >= ends).int()
    own = (x[rows] for x in (tokens[:, :-1], labels, documents))
    return Batch(*own, [[]] * len(tokens[rows]))
