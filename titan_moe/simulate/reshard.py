"""What it takes to move a model and its optimizer's moments from one layout to another in memory:
bytes, time and memory, by arithmetic.

Who holds what comes from the numbers of a layout (titan_moe/verify/layouts/shards.py), who sends
what from the plan that a transfer carries out. Buffers of modules, of which every rank has a few
kilobytes, are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from titan_moe.config.checks.job import check
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.pipeline import model_parts
from titan_moe.distributed.boxes import Box, overlap, sizes
from titan_moe.distributed.sharding_moves import Link
from titan_moe.distributed.transfer_plan import Held, TransferPlan, plan_transfer
from titan_moe.models.config import ModelConfig
from titan_moe.models.stats import part_weights
from titan_moe.optim.optimizers import is_hidden_matrix
from titan_moe.verify.layouts.layouts import layout_tables, parse, with_tables
from titan_moe.verify.layouts.models import LayoutModel
from titan_moe.verify.layouts.shards import Shards, tensor_dims

GB = 1e9
_DEGREES = (
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "expert_parallel_degree",
    "expert_tensor_parallel_degree",
)
Holding = dict[str, Held]
"""What a rank has of each tensor, by its name."""


class Machine(NamedTuple):
    """What ranks are connected by."""

    ranks_per_node: int
    inside: Link
    """Of a rank to all others of its node, each way."""
    between: Link
    """Of a rank to all other nodes, each way."""


class LinkTraffic(NamedTuple):
    """Bytes over one kind of link."""

    total: int
    most_sent: int
    """By one rank."""
    most_received: int
    most_of_a_pair: int
    """From one rank to one other."""


@dataclass(frozen=True)
class Reshard:
    """What a move from one layout to another takes."""

    source: str
    target: str
    bytes: np.ndarray
    """[from rank, to rank]; what a rank keeps is not counted."""
    fewest_bytes: int
    """That any way of moving has to send: what ranks are to hold and do not."""
    state_bytes: int
    """Of all tensors, each once."""
    inside: LinkTraffic
    between: LinkTraffic
    calls: int
    """All-to-alls."""
    seconds: float
    before_bytes: int
    """Held by the rank that holds most."""
    after_bytes: int
    peak_bytes: int
    """Of any rank meanwhile: what it leaves, what it gets and the buffers of an all-to-all."""

    def as_json(self) -> dict[str, Any]:
        """All figures, the matrix of bytes as lists."""
        found = {**vars(self), "bytes": self.bytes.tolist()}
        return found | {name: found[name]._asdict() for name in ("inside", "between")}

    def in_words(self, machine: Machine) -> list[str]:
        """The same as lines."""
        ranks = len(self.bytes)
        moved = int(self.bytes.sum())
        lines = [
            f"{ranks} ranks, {machine.ranks_per_node} on a node: {self.source} -> {self.target}",
            f"weights and moments {self.state_bytes / GB:,.3f} GB; {moved / GB:,.3f} GB move, in "
            f"{self.calls} all-to-all(s); the fewest possible are {self.fewest_bytes / GB:,.3f}",
            f"{'GB':<16}{'in all':>12}{'most sent':>12}{'received':>12}{'of a pair':>12}",
        ]
        for name, traffic in (("inside nodes", self.inside), ("between nodes", self.between)):
            lines.append(f"{name:<16}" + "".join(f"{each / GB:>12,.3f}" for each in traffic))
        rates = [link.bytes_per_second / GB for link in (machine.inside, machine.between)]
        return [
            *lines,
            f"{1e3 * self.seconds:,.3f} ms at {rates[0]:g} GB/s inside and {rates[1]:g} GB/s "
            "between nodes, for each rank and direction",
            f"memory of a rank, GB: {self.before_bytes / GB:,.3f} before, "
            f"{self.after_bytes / GB:,.3f} after, at most {self.peak_bytes / GB:,.3f} meanwhile",
        ]


def reshard(
    job: JobConfig, config: ModelConfig, source: str, target: str, machine: Machine
) -> Reshard:
    """The move of a job's model from one layout to another.

    Raises ConfigError for a layout that the job cannot run in, and for two of different worlds.
    """
    world_size, other = (parse(text).world_size for text in (source, target))
    if world_size != other:
        raise ConfigError(
            [
                f"--from {source} has {world_size} ranks and --to {target} {other}: a move in "
                "memory stays within one world; a checkpoint loads in any"
            ]
        )
    gpus = machine.ranks_per_node
    before, after = (holdings(job, config, text, num_gpus=gpus) for text in (source, target))
    # As Trainer.reshard has it: parameters first, whose old parts are free while moments move.
    plans = [
        plan_transfer(*([_of_kind(rank, kind) for rank in ranks] for ranks in (before, after)))
        for kind in ("parameter", "moment")
    ]
    moved = plans[0].bytes + plans[1].bytes
    far = _far(world_size, machine.ranks_per_node)
    tensors = {name: each for rank in after for name, each in rank.items()}
    return Reshard(
        source,
        target,
        bytes=moved,
        fewest_bytes=sum(_missing(*pair) for pair in zip(before, after, strict=True)),
        state_bytes=sum(prod(each.shape) * each.dtype.itemsize for each in tensors.values()),
        inside=_traffic(moved * ~far),
        between=_traffic(moved * far),
        calls=sum(plan.calls for plan in plans),
        seconds=sum(_seconds(plan, machine) for plan in plans),
        before_bytes=max(map(_held_bytes, before)),
        after_bytes=max(map(_held_bytes, after)),
        peak_bytes=_peak(before, after, plans),
    )


def holdings(job: JobConfig, config: ModelConfig, text: str, *, num_gpus: int = 0) -> list[Holding]:
    """What every rank of a layout has of parameters and moments. Raises ConfigError.

    `num_gpus`: as in `check`.
    """
    layout = parse(text)
    parallelism = layout_tables(layout)["parallelism"]
    degrees = {key: parallelism[key] for key in _DEGREES}
    if "schedule" in text:
        degrees["pipeline_parallel_schedule"] = layout.schedule
    job = with_tables(job, {"parallelism": degrees})
    if problems := check(job, config, layout.world_size, num_gpus=num_gpus):
        raise ConfigError([f"{text}: {problem}" for problem in problems])
    layout = replace(layout, schedule=job.parallelism.pipeline_parallel_schedule)
    stages: list[list[str]] = []
    if layout.pp > 1:
        weights = part_weights(config, job.training.seq_len)
        stages = model_parts(job.parallelism, weights, config.num_layers)
    model = LayoutModel(job, config, tuple(map(tuple, stages)))
    shapes, shards = model.shapes(), Shards(layout, tensor_dims(), stages)
    return [dict(_of_rank(job, shards, rank, shapes, config)) for rank in range(layout.world_size)]


def _of_rank(
    job: JobConfig,
    shards: Shards,
    rank: int,
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
) -> Iterator[tuple[str, Held]]:
    for name, shape in shapes.items():
        if shards.holds(rank, name):
            box = shards.box(rank, name, shape)
            for kind, dtype in _kinds(job, name, shape).items():
                yield f"{name} {kind}", Held(shape, dtype, box)


def _kinds(job: JobConfig, name: str, shape: tuple[int, ...]) -> dict[str, torch.dtype]:
    """A parameter and its moments, and their types."""
    own: torch.dtype = getattr(torch, job.training.dtype)
    moment = torch.bfloat16 if job.optimizer.state_dtype == "bfloat16" else own
    parameter = torch.nn.Parameter(torch.empty(shape, device="meta"))
    if job.optimizer.name == "Muon" and is_hidden_matrix(name, parameter):
        return {"parameter": own, "momentum_buffer": moment}
    return {"parameter": own, "exp_avg": moment, "exp_avg_sq": moment}


def _of_kind(holding: Holding, kind: str) -> Holding:
    """Its parameters, or its moments."""
    return {
        name: held
        for name, held in holding.items()
        if name.endswith(" parameter") == (kind == "parameter")
    }


def _held_bytes(holding: Holding) -> int:
    return sum(_bytes(held, held.box) for held in holding.values())


def _bytes(held: Held, box: Box) -> int:
    return prod(sizes(box)) * held.dtype.itemsize


def _missing(before: Holding, after: Holding) -> int:
    """Bytes that a rank is to hold and does not."""
    missing = _held_bytes(after)
    for name, held in after.items():
        if name in before:
            missing -= _bytes(held, overlap(held.box, before[name].box))
    return missing


def _far(world_size: int, ranks_per_node: int) -> np.ndarray:
    """[from, to]: whether two ranks are on different nodes."""
    node = np.arange(world_size) // ranks_per_node
    return np.asarray(node[:, None] != node)


def _traffic(between_ranks: np.ndarray) -> LinkTraffic:
    return LinkTraffic(
        int(between_ranks.sum()),
        int(between_ranks.sum(axis=1).max()),
        int(between_ranks.sum(axis=0).max()),
        int(between_ranks.max()),
    )


def _seconds(plan: TransferPlan, machine: Machine) -> float:
    """One all-to-all after the other, each as long as its slowest rank's slower kind of link."""
    far = _far(plan.world_size, machine.ranks_per_node)
    seconds = 0.0
    for between_ranks in _exchanged(plan):
        times = [0.0]
        for link, over in ((machine.inside, ~far), (machine.between, far)):
            moved = between_ranks * over
            if most := max(moved.sum(axis=0).max(), moved.sum(axis=1).max()):
                times.append(link.latency_s + most / link.bytes_per_second)
        seconds += max(times)
    return float(seconds)


def _peak(
    before: Sequence[Holding], after: Sequence[Holding], plans: Sequence[TransferPlan]
) -> int:
    """Of the rank that holds most, while its parameters move or while its moments do."""

    def held(ranks: Sequence[Holding], kind: str) -> np.ndarray:
        return np.array([_held_bytes(_of_kind(rank, kind)) for rank in ranks])

    moments, parameters = held(before, "moment"), held(after, "parameter")
    first = held(before, "parameter") + moments + parameters + _buffers(plans[0])
    second = moments + parameters + held(after, "moment") + _buffers(plans[1])
    return int(np.maximum(first, second).max())


def _buffers(plan: TransferPlan) -> np.ndarray:
    """[rank]: bytes of the largest all-to-all's buffers, one to send from, one to receive into."""
    each = [moved.sum(axis=0) + moved.sum(axis=1) for moved in _exchanged(plan)]
    return np.max(each, axis=0) if each else np.zeros(plan.world_size, np.int64)


def _exchanged(plan: TransferPlan) -> Iterator[np.ndarray]:
    for moved in plan.bucket_bytes:
        yield moved * ~np.eye(plan.world_size, dtype=bool)
