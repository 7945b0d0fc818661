"""What a rank sends, makes and holds in worlds of any size, counted in fake worlds, and the law
that must hold: nothing per rank grows with the world faster than the shard that it owns.
"""

import gc
import time
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.parallel_dims import parallel_dims
from titan_moe.distributed.parallelize import lay_out
from titan_moe.distributed.policies import resolve_model
from titan_moe.models.config import ModelConfig
from titan_moe.simulate.comm_counter import WORLD
from titan_moe.simulate.fake_rank import CPU, FakeRank, fake_world, microbatches_to_run
from titan_moe.verify.layouts.groups import JOINED_AXES

MOST_METADATA = 256
"""Bytes of bookkeeping that each further rank of the world may cost every rank: torch's own tables
of the world's group and the meshes' numbers take about half of it, 0.3 MB at 4,096 ranks."""
_MOST_RSS_GROWTH = 32 * 2**20
_PADDING = 0.02
"""Of an axis' bytes: FSDP pads a tensor that has fewer rows than there are ranks."""
_STAT_PAGES = Path("/proc/self/statm")


@dataclass(frozen=True)
class RankFacts:
    """What was counted of one rank."""

    world_size: int
    degrees: dict[str, int]
    """Of every axis."""
    num_microbatches: int
    tokens: int
    """That this rank reads in a step."""
    traffic: dict[str, dict[str, tuple[int, float]]]
    """Axis -> operation -> calls and bytes that leave the rank in a step."""
    num_groups: int
    """Process groups of two ranks or more, the world's not counted."""
    new_group_calls: int
    metadata_bytes: int
    """What the groups and meshes keep in the host's memory."""
    mesh_seconds: float
    """CPU time to make all groups and meshes; nothing is exchanged."""
    layout_seconds: float
    """CPU time to lay out the model over them: shards, hooks; no weights."""
    simulation_seconds: float
    """To build the fake rank and run its step."""
    rss_import: int
    """Bytes of this process before there is a world."""
    rss_built: int
    """And with the model laid out: structure, hooks, groups; no weights."""
    parameter_bytes: int
    """The shard that this rank owns."""
    optimizer_bytes: int

    def bytes_by_axis(self) -> dict[str, float]:
        """Bytes that leave the rank in a step, over each axis."""
        return {axis: sum(b for _, b in ops.values()) for axis, ops in self.traffic.items()}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(job: JobConfig, config: ModelConfig, world_size: int, rank: int = 0) -> RankFacts:
    """Count a rank's step, in a process that has not been another rank.

    `job` is resolved for the world: its global batch size says how many microbatches a step has, of
    which only the first few are run.
    """
    torch.set_num_threads(1)
    rss_import = _rss()
    start_up = _start_up(job, config, world_size, rank)
    started = time.perf_counter()
    with fake_world(rank, world_size):
        fake = FakeRank(job, config)
        meshes = fake.sharded.meshes
        dims, training = meshes.dims, job.training
        microbatch = training.local_batch_size * dims.size("batch")
        microbatches = training.global_batch_size // microbatch
        volumes = fake.step(min(microbatches_to_run(job.parallelism), microbatches))
        traffic: dict[str, dict[str, tuple[int, float]]] = {}
        for flow, (calls, sent) in volumes.of(microbatches).items():
            traffic.setdefault(flow.axis, {})[flow.op] = (calls, sent)
        parameters = [parameter for _, parameter in fake.sharded.named_parameters()]
        states = [x for s in fake.optimizer.state.values() for x in s.values()]
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "edp", "ep", "etp")
        return RankFacts(
            world_size=world_size,
            degrees={axis: dims.size(axis) for axis in axes},
            num_microbatches=microbatches,
            tokens=microbatches * training.local_batch_size * training.seq_len // dims.cp,
            traffic=traffic,
            num_groups=meshes.groups.num_groups,
            new_group_calls=fake.new_group_calls,
            simulation_seconds=time.perf_counter() - started,
            rss_import=rss_import,
            parameter_bytes=_own_bytes(parameters),
            optimizer_bytes=_own_bytes(x for x in states if isinstance(x, Tensor)),
            **start_up,
        )


def violations(curve: Sequence[RankFacts]) -> list[str]:
    """Where growing worlds, with a rank's batch the same, break the law; each against the smallest.

    Bytes of an axis may grow by what a ring of more ranks sends: from (P - 1) / P to 1 of what it
    carries, and by FSDP's padding of small tensors. Calls, groups and calls that make groups stay;
    the own shard never grows.
    """
    first, *others = sorted(curve, key=lambda facts: facts.world_size)
    return [
        f"{first.world_size} -> {facts.world_size} ranks: {line}"
        for facts in others
        for line in (*_traffic_violations(first, facts), *_other_violations(first, facts))
    ]


def _traffic_violations(first: RankFacts, facts: RankFacts) -> Iterator[str]:
    for axis, ops in facts.traffic.items():
        for op, (calls, sent) in ops.items():
            if axis not in first.traffic or op not in first.traffic[axis]:
                continue  # An axis of one rank there.
            calls_before, before = first.traffic[axis][op]
            size = _ranks_of(first, axis)
            if sent > before * size / (size - 1) * (1 + _PADDING):
                yield f"{op} over {axis} from {before:,.0f} to {sent:,.0f} bytes"
            if calls > calls_before:
                yield f"{op} over {axis} from {calls_before} to {calls} calls"


def _other_violations(first: RankFacts, facts: RankFacts) -> Iterator[str]:
    limits = {
        "num_groups": max(first.num_groups, 11),
        "new_group_calls": max(first.new_group_calls, 11),
        "parameter_bytes": first.parameter_bytes,
        "optimizer_bytes": first.optimizer_bytes,
    }
    for what, limit in limits.items():
        if getattr(facts, what) > limit:
            yield f"{what} from {getattr(first, what):,} to {getattr(facts, what):,}"
    further = facts.world_size - first.world_size
    grown = facts.metadata_bytes - first.metadata_bytes
    if grown > MOST_METADATA * further:
        yield (
            f"{grown / further:,.0f} bytes of groups and meshes for each further rank of the "
            f"world, at most {MOST_METADATA}"
        )
    grown = facts.rss_built - first.rss_built
    if grown > _MOST_RSS_GROWTH + MOST_METADATA * further:
        yield f"{grown / 2**20:,.0f} MiB more of the host's memory"


def _ranks_of(facts: RankFacts, axis: str) -> int:
    if axis == WORLD:
        return facts.world_size
    name = axis.split("+")[0]
    return prod(facts.degrees[part] for part in JOINED_AXES.get(name, (name,)))


def _start_up(job: JobConfig, config: ModelConfig, world_size: int, rank: int) -> dict[str, Any]:
    """What a rank makes and keeps before its first step."""
    dims = parallel_dims(job.parallelism, world_size)
    config = resolve_model(config, job)
    with fake_world(rank, world_size):
        dims.build_mesh(CPU.type)  # Imports and caches are not counted.
    gc.collect()
    tracemalloc.start()
    with fake_world(rank, world_size):
        meshes = dims.build_mesh(CPU.type)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        kept += meshes.dense.mesh.nbytes + meshes.sparse.mesh.nbytes
    started = time.process_time()
    with fake_world(rank, world_size):
        meshes = dims.build_mesh(CPU.type)
        made = time.process_time()
        parts = lay_out(job, config, meshes, CPU)
        laid_out = time.process_time()
        rss = _rss()
        del parts
    return {
        "metadata_bytes": kept,
        "mesh_seconds": made - started,
        "layout_seconds": laid_out - made,
        "rss_built": rss,
    }


def _own_bytes(tensors: Iterable[Tensor]) -> int:
    own = (local_part(x) for x in tensors)
    return sum(x.numel() * x.element_size() for x in own)


def _rss() -> int:
    """Bytes of this process that are in memory; 0 where there is no /proc."""
    gc.collect()
    if not _STAT_PAGES.exists():
        return 0
    return int(_STAT_PAGES.read_text().split()[1]) * 4096
