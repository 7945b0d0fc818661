"""Counts what a rank sends and owns in one step of a configuration, in a fake world."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titan_moe.checks.job import check
from titan_moe.checks.notes import without_experts
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import resolve
from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.parallel_dims import Axes
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.fake_rank import FakeRank, fake_world, microbatches_to_run

Task = tuple[JobConfig, ModelConfig, int, int]
"""The resolved job, its model, the world's size and the rank to be."""


@dataclass(frozen=True)
class RankFacts:
    """Counts of one rank's step."""

    world_size: int
    degrees: Axes
    """Degree of every axis."""
    num_microbatches: int
    tokens: int
    """Tokens that this rank reads in a step."""
    traffic: dict[str, dict[str, tuple[int, float]]]
    """Axis -> operation -> calls and bytes that leave the rank in a step."""
    num_groups: int
    """Process groups of two ranks or more before the step, the world's not counted."""
    parameter_bytes: int
    """Bytes of the shard that this rank owns."""
    optimizer_bytes: int
    most_bytes: int
    """Bytes of the tensors that are alive at most in a step."""
    seconds: float
    """Time to build the fake rank and to run its step."""

    def in_words(self) -> str:
        """Returns a table of bytes sent, and a line of what the rank owns."""
        degrees = " ".join(f"{axis}={size}" for axis, size in self.degrees.items() if size > 1)
        lines = [
            f"{self.world_size:,} ranks ({degrees}): {self.tokens:,} tokens a step and rank in "
            f"{self.num_microbatches} microbatch(es)",
            f"{'axis':<16}{'operation':<18}{'calls':>8}{'GB sent':>12}",
        ]
        for axis, ops in self.traffic.items():
            for op, (calls, sent) in ops.items():
                lines.append(f"{axis:<16}{op:<18}{calls:>8,}{sent / 1e9:>12.4f}")
        total = sum(sent for ops in self.traffic.values() for _, sent in ops.values())
        lines.append(f"{'all':<34}{'':>8}{total / 1e9:>12.4f}")
        lines.append(
            f"{self.num_groups} process groups besides the world's; own shard "
            f"{self.parameter_bytes / 1e9:.3f} GB of weights, {self.optimizer_bytes / 1e9:.3f} GB "
            f"of optimizer state, at most {self.most_bytes / 1e9:.3f} GB of tensors; counted in "
            f"{self.seconds:.0f} s"
        )
        return "\n".join(lines)


def rank_step(job: JobConfig, world_size: int, *, rank: int = 0, layers: int | None = None) -> Task:
    """Returns the step of `rank` in a world; `layers` keeps the model's first layers alone.

    Raises ConfigError for a configuration that cannot run on so many ranks.
    """
    config = model_of_job(job.model)
    if layers:
        config = replace(config, num_layers=min(layers, config.num_layers))
    if config.moe is None:
        job = without_experts(job)
    problems = check(job, config, world_size)
    if not 0 <= rank < world_size:
        problems.append(f"rank {rank}: there are {world_size} ranks: choose one below")
    if problems:
        raise ConfigError(problems)
    return resolve(job, world_size), config, world_size, rank


def simulate_steps(tasks: Sequence[Task]) -> Iterator[RankFacts]:
    """Runs each step in a process of its own, one after another; none sees a GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for _, facts in in_fresh_processes(measure, tasks, num_workers=1):
        yield facts


def measure(job: JobConfig, config: ModelConfig, world_size: int, rank: int = 0) -> RankFacts:
    """Counts a rank's step, in a process that has not been another rank.

    `job` is resolved for the world: its global batch size says how many microbatches a step has, of
    which only the first few are run.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    with fake_world(rank, world_size):
        fake = FakeRank(job, config, counts_memory=True)
        assert fake.storages is not None
        meshes = fake.sharded.meshes
        num_groups = meshes.groups.num_groups
        dims, training = meshes.dims, job.training
        microbatch = training.local_batch_size * dims.size("batch")
        microbatches = training.global_batch_size // microbatch
        volumes = fake.step(min(microbatches_to_run(job.parallelism), microbatches))
        traffic: dict[str, dict[str, tuple[int, float]]] = {}
        for flow, (calls, sent) in volumes.of(microbatches).items():
            traffic.setdefault(flow.axis, {})[flow.op] = (calls, sent)
        states = [x for state in fake.optimizer.state.values() for x in state.values()]
        return RankFacts(
            world_size=world_size,
            degrees=dims.sizes,
            num_microbatches=microbatches,
            tokens=microbatches * training.local_batch_size * training.seq_len // dims.cp,
            traffic=traffic,
            num_groups=num_groups,
            parameter_bytes=_own_bytes(p for _, p in fake.sharded.named_parameters()),
            optimizer_bytes=_own_bytes(x for x in states if isinstance(x, Tensor)),
            most_bytes=fake.storages.most,
            seconds=time.perf_counter() - started,
        )


def _own_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_part(x).nbytes for x in tensors)
