"""A configuration of a tiny model, and rows for it, for tests of parts of a step."""

from dataclasses import replace

import torch
from torch import Tensor

from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import model_of_job

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


def global_batch(step: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels, documents of all rows; the number of ignored targets differs from row to
    row."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocab_size, (ROWS, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : 2 * row % 19] = -100
    ends = torch.randint(3, SEQ_LEN, (ROWS, 1), generator=generator)
    documents = (torch.arange(SEQ_LEN) >= ends).int()
    return tokens[:, :-1], labels, documents
