"""A model's shape for the checks of a configuration, and what they say."""

from dataclasses import dataclass

from titan_moe.config.checks.job import check, notes
from titan_moe.config.parse import load_job


@dataclass(frozen=True)
class Heads:
    num_heads: int = 16
    num_kv_heads: int = 8


@dataclass(frozen=True)
class Experts:
    num_experts: int = 8
    top_k: int = 2
    hidden_dim: int = 256
    num_shared_experts: int = 1
    projection_bias: bool = False


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 272
    max_seq_len: int = 4096
    num_layers: int = 4
    dim: int = 64
    attention: Heads = Heads()
    hidden_dim: int = 512
    num_dense_layers: int = 1
    moe: Experts | None = Experts()
    num_mtp_layers: int = 0

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.num_dense_layers


def problems(arguments: str, ranks: int = 1, gpus: int = 0, moe: bool = True) -> list[str]:
    model = Shape(moe=Experts() if moe else None)
    return check(load_job(arguments.split()), model, ranks, num_gpus=gpus)


def noted(arguments: str, ranks: int = 1, gpus: int = 0, moe: bool = True) -> list[str]:
    """The notes about a configuration in which nothing is wrong."""
    assert problems(arguments, ranks, gpus, moe) == []
    model = Shape(moe=Experts() if moe else None)
    return notes(load_job(arguments.split()), model, ranks, num_gpus=gpus)
