"""One rank's step of a configuration in a fake world, as a task for a process, and in words."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from titan_moe.config.checks.job import check
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import resolve
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.scaling import RankFacts, measure

_GPUS_OF_A_NODE = 8
Task = tuple[JobConfig, ModelConfig, int, int]
"""The resolved job, its model, the world's size and the rank to be."""


def rank_step(job: JobConfig, world_size: int, *, rank: int = 0, layers: int | None = None) -> Task:
    """The step of `rank` in a world of that size; `layers` keeps the model's first alone.

    Raises ConfigError for a configuration that cannot run on so many ranks.
    """
    config = model_of_job(job.model)
    if layers:
        config = replace(config, num_layers=min(layers, config.num_layers))
    problems = check(job, config, world_size, num_gpus=_GPUS_OF_A_NODE)
    if not 0 <= rank < world_size:
        problems.append(f"--rank {rank}: there are {world_size} ranks: choose one below")
    if problems:
        raise ConfigError(problems)
    return resolve(job, world_size), config, world_size, rank


def one_microbatch(job: JobConfig) -> JobConfig:
    """The job's first stage with a global batch that grows with the world: each rank keeps one
    microbatch."""
    training = job.training.model_copy(update={"global_batch_size": -1})
    return job.model_copy(update={"training": training, "stages": []})


def simulate(tasks: Sequence[Task]) -> Iterator[RankFacts]:
    """Run each step in a process of its own, one after another; none sees a GPU."""
    # What is counted is the program's, and a CPU counts it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for _, facts in in_fresh_processes(measure, tasks, num_workers=1):
        yield facts


def in_words(facts: RankFacts) -> str:
    """A table of what is sent, and what the rank holds and makes."""
    degrees = " ".join(f"{axis}={size}" for axis, size in facts.degrees.items() if size > 1)
    lines = [
        f"{facts.world_size:,} ranks ({degrees}): {facts.tokens:,} tokens a step and rank in "
        f"{facts.num_microbatches} microbatch(es)",
        f"{'axis':<16}{'operation':<18}{'calls':>8}{'GB sent':>12}",
    ]
    total = 0.0
    for axis, ops in facts.traffic.items():
        for op, (calls, sent) in ops.items():
            lines.append(f"{axis:<16}{op:<18}{calls:>8,}{sent / 1e9:>12.4f}")
            total += sent
    return "\n".join(
        [
            *lines,
            f"{'all':<34}{'':>8}{total / 1e9:>12.4f}",
            f"groups of the rank {facts.num_groups} besides the world's, made by "
            f"{facts.new_group_calls} calls; groups and meshes keep "
            f"{facts.metadata_bytes / 1e6:.2f} MB; CPU time {1e3 * facts.mesh_seconds:.0f} ms, and "
            f"{facts.layout_seconds:.2f} s to lay out the model",
            f"own shard {facts.parameter_bytes / 1e9:.3f} GB of weights, "
            f"{facts.optimizer_bytes / 1e9:.3f} GB of optimizer state",
            f"host memory without weights {facts.rss_built / 2**20:.0f} MiB, "
            f"{facts.rss_import / 2**20:.0f} of it imports; counted in "
            f"{facts.simulation_seconds:.0f} s",
        ]
    )
