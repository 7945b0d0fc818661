"""What the checks look at: a configuration, a model's dimensions and a number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from titan_moe.config.job_config import JobConfig


class Attention(Protocol):
    """The heads of a model."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...


class Experts(Protocol):
    """The routed and shared experts of a model."""

    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def hidden_dim(self) -> int: ...
    @property
    def num_shared_experts(self) -> int: ...
    @property
    def projection_bias(self) -> bool: ...


class ModelShape(Protocol):
    """What the rules read of a model's dimensions."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def attention(self) -> Attention: ...
    @property
    def hidden_dim(self) -> int: ...
    @property
    def moe(self) -> Experts | None: ...
    @property
    def num_mtp_layers(self) -> int: ...
    def is_moe_layer(self, layer: int) -> bool: ...


@dataclass(frozen=True)
class Run:
    """One configuration on one machine."""

    job: JobConfig
    model: ModelShape
    world_size: int
    num_gpus: int

    @property
    def flavor(self) -> str:
        return flavor(self.job)

    @property
    def shard(self) -> int | None:
        """The size of dp_shard; None where the degrees do not fit the ranks."""
        return self.job.parallelism.shard_degree(self.world_size)

    @property
    def data_ranks(self) -> int | None:
        """Ranks that read different sequences."""
        return self.shard and self.job.parallelism.data_parallel_replicate_degree * self.shard


class Note(str):
    """A rule's line about a key that has no effect in this run: logged, and no mistake."""


Check = Callable[[Run], list[str]]
"""Gives one line for each mistake that it finds, or a Note."""


def flavor(job: JobConfig) -> str:
    """How messages name the model."""
    return f"{job.model.name} {job.model.flavor}"


def divisors(number: int) -> str:
    """All of them, as words."""
    return either([n for n in range(1, number + 1) if number % n == 0])


def neighbours(number: int, step: int, limit: int) -> str:
    """The multiples of `step` just below and above `number`, none above `limit` >= step."""
    below = min(number, limit) // step * step
    return either([n for n in (below, below + step) if step <= n <= limit])


def either(choices: list[int]) -> str:
    """1, 2 or 4."""
    *others, last = (str(choice) for choice in choices)
    return f"{', '.join(others)} or {last}" if others else last
