"""The configuration that rules look at, and helpers for their sentences."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_moe.config.errors import Change, Mistake
from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import ModelConfig


@dataclass(frozen=True)
class Run:
    """One configuration on a number of ranks."""

    job: JobConfig
    model: ModelConfig
    world_size: int

    @property
    def flavor(self) -> str:
        return flavor(self.job)

    @property
    def shard(self) -> int | None:
        """The size of dp_shard; None where the degrees do not fit the ranks."""
        return self.job.parallelism.shard_degree(self.world_size)

    @property
    def pipelines_tp(self) -> bool:
        """True if compiled layers hide tensor parallelism's collectives behind products."""
        degrees, compiled = self.job.parallelism, self.job.compile
        asked = degrees.enable_async_tensor_parallel and degrees.tensor_parallel_degree > 1
        return asked and compiled.compiles_layers and compiled.backend == "inductor"

    @property
    def sequence_lengths(self) -> dict[str, int]:
        """Returns the lengths of the sequences that the run reads, by their keys."""
        training, validation = self.job.training, self.job.validation
        if not validation.enable or validation.seq_len is None:
            return {"training.seq_len": training.seq_len}
        return {"training.seq_len": training.seq_len, "validation.seq_len": validation.seq_len}


Rule = Callable[[Run], Iterable[str | Mistake]]
"""Yields one line for each mistake that it finds: key, value, remedy."""


def flat(job: JobConfig) -> dict[str, Any]:
    """Returns the values of all keys by their dotted names, without stages."""
    tables = job.model_dump(exclude={"stages"}).items()
    return {f"{table}.{key}": value for table, keys in tables for key, value in keys.items()}


def narrow_keys(job: JobConfig) -> list[str]:
    """Returns the keys by which the optimizer's moments are in bfloat16."""
    moments, stored = job.optimizer.state_dtype, job.training.dtype
    types = {"optimizer.state_dtype": moments, "training.dtype": stored}
    return [key for key, dtype in types.items() if dtype == "bfloat16"]


def flavor(job: JobConfig) -> str:
    """Returns the name of the model in messages."""
    return f"{job.model.name} {job.model.flavor}"


def divisors(key: str, number: int) -> list[list[Change]]:
    """Returns a remedy for each divisor: that value of the key."""
    return choices(key, [n for n in range(1, number + 1) if number % n == 0])


def must_divide(key: str, degree: int, sizes: Mapping[str, int], of: str = "") -> Iterator[Mistake]:
    """Yields a mistake unless the key's value divides all sizes, given by their names."""
    if broken := [f"{name}={size}" for name, size in sizes.items() if size % degree]:
        yield Mistake(
            f"{key}={degree} must divide {' and '.join(broken)}{of}",
            divisors(key, math.gcd(*sizes.values())),
            "choose another degree",
        )


def choices(key: str, values: Iterable[int]) -> list[list[Change]]:
    """Returns a remedy for each of the values of a key."""
    return [[{key: value}] for value in values]


def either(values: Sequence[object]) -> str:
    """Joins values: "1, 2 or 4"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
