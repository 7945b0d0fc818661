"""Pipeline schedules as data, and how a model's layers become stages. Arithmetic only, no torch.

The schedules are those of torch.distributed.pipelining. Torch's own errors come from inside a
running process, so the rules stand here as well. Sources: 1F1B and Interleaved1F1B arXiv
2104.04473, GPipe 1811.06965, LoopedBFS 2211.05953, InterleavedZeroBubble (ZB-1P) and ZBVZeroBubble
2401.10241, DualPipeV 2412.19437.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from itertools import count as count_from
from typing import Literal

from titan_moe.config.errors import Mistake
from titan_moe.config.job_config import Parallelism


@dataclass(frozen=True)
class Schedule:
    """Holds the fixed properties of a schedule."""

    name: str
    placement: Literal["single", "loop", "v"]
    """'single': one stage a rank; 'loop': rank r holds stages r, r + P, ...; 'v': r and 2P-1-r."""
    splits_backward: bool
    """The gradients of weights come later than those of inputs, through autograd.grad."""
    microbatches: Literal["any", "stages", "rounds"]
    """'stages': at least as many as stages; 'rounds': a multiple of max(1, microbatches // P)."""
    idle: int
    """A rank waits this long for each other rank; unit: a forward of one stage, which takes as long
    as each half of its backward."""


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("1F1B", "single", splits_backward=False, microbatches="stages", idle=3),
        Schedule("Interleaved1F1B", "loop", splits_backward=False, microbatches="rounds", idle=3),
        Schedule("GPipe", "single", splits_backward=False, microbatches="any", idle=3),
        Schedule("LoopedBFS", "loop", splits_backward=False, microbatches="any", idle=3),
        Schedule(
            "InterleavedZeroBubble", "loop", splits_backward=True, microbatches="rounds", idle=1
        ),
        Schedule("ZBVZeroBubble", "v", splits_backward=True, microbatches="any", idle=1),
        Schedule("DualPipeV", "v", splits_backward=True, microbatches="stages", idle=2),
    )
}


def schedule_of(parallelism: Parallelism) -> Schedule:
    return SCHEDULES[parallelism.pipeline_parallel_schedule]


def overlaps_chunks(parallelism: Parallelism) -> bool:
    """Returns whether one chunk's backward runs beside another chunk's forward."""
    paired = parallelism.pipeline_parallel_schedule == "DualPipeV"
    degrees = parallelism.pipeline_parallel_degree, parallelism.expert_parallel_degree
    return min(degrees) > 1 and paired and parallelism.pipeline_parallel_expert_parallel_overlap


def num_stages(parallelism: Parallelism, num_layers: int) -> int:
    """Stages of the whole pipeline; a multiple of the ranks once `problems` finds nothing."""
    if (parts := parallelism.module_fqns_per_model_part) is not None:
        return len(parts)
    if (size := parallelism.pipeline_parallel_layers_per_stage) is not None:
        first = parallelism.pipeline_parallel_first_stage_less_layers or 0
        last = parallelism.pipeline_parallel_last_stage_less_layers or 0
        return math.ceil((first + num_layers + last) / size)
    return parallelism.pipeline_parallel_degree * _default_per_rank(schedule_of(parallelism))


def _default_per_rank(schedule: Schedule) -> int:
    return 1 if schedule.placement == "single" else 2


def stages_of_rank(schedule: Schedule, rank: int, num_ranks: int, stages: int) -> list[int]:
    """The stages that a rank of the pipeline holds, ascending."""
    if schedule.placement == "v":
        return [rank, 2 * num_ranks - 1 - rank]
    return list(range(rank, stages, num_ranks))


def num_microbatches(parallelism: Parallelism, local_batch_size: int) -> int:
    """Microbatches of one run of the schedule."""
    return local_batch_size // parallelism.pipeline_parallel_microbatch_size


def bubble_fraction(schedule: Schedule, ranks: int, stages: int, microbatches: int) -> float:
    """Returns the share of the ranks' time in which they wait, for stages that cost the same.

    Communication counts as nothing. ZBVZeroBubble waits longer with fewer than 2P microbatches.
    """
    idle = schedule.idle * (ranks - 1)
    return idle / (3 * (stages // ranks) * microbatches + idle)


def in_flight(
    schedule: Schedule, rank: int, ranks: int, stages: int, microbatches: int
) -> tuple[int, int]:
    """Returns how many microbatches are between forward and backward on a rank at most.

    Exact for torch's orders, but for ZBVZeroBubble with fewer than 2P microbatches an upper bound.

    Returns:
        The sum over the rank's stages, and the number on the last stage of the pipeline, if this
        rank holds it.
    """
    per_rank = stages // ranks
    in_round = microbatches // max(1, microbatches // ranks)
    most, last = {
        "1F1B": (ranks - rank, 1),
        "GPipe": (microbatches, microbatches),
        "LoopedBFS": (per_rank * microbatches, microbatches),
        "Interleaved1F1B": ((per_rank - 1) * in_round + 2 * (ranks - 1 - rank) + 1, 1),
        "InterleavedZeroBubble": ((per_rank - 1) * in_round + ranks, ranks),
        "ZBVZeroBubble": (2 * ranks, 1),
        "DualPipeV": (2 * ranks + 1, 1),
    }[schedule.name]
    holds_last = stages - 1 in stages_of_rank(schedule, rank, ranks, stages)
    return min(most, per_rank * microbatches), min(last, microbatches) * holds_last


# --- splitting ------------------------------------------------------------------------------------


def module_names(num_layers: int) -> list[str]:
    """The modules that stages divide among them, in the model's order."""
    layers = [f"layers.{layer}" for layer in range(num_layers)]
    return ["tok_embeddings", *layers, "norm", "output"]


def model_parts(
    parallelism: Parallelism, weights: Mapping[str, float], num_layers: int
) -> list[list[str]]:
    """The modules of each stage: as configured, or so that the heaviest is as light as possible.

    A stage has one or more layers. Of all such cuts, the most even one (least sum of squares).

    Args:
        weights: the cost of each of `module_names`, in any unit. The embedding, or norm and output,
            cost as much as some layers of average weight where the configuration says so.
    """
    if (named := parallelism.module_fqns_per_model_part) is not None:
        return [list(part) for part in named]
    stages = num_stages(parallelism, num_layers)
    first_less = parallelism.pipeline_parallel_first_stage_less_layers
    last_less = parallelism.pipeline_parallel_last_stage_less_layers
    layers = [name for name in weights if name.startswith("layers.")]
    assert len(layers) >= stages, f"{len(layers)} layers do not make {stages} stages"
    average = sum(weights[name] for name in layers) / len(layers)
    first = weights["tok_embeddings"] if first_less is None else first_less * average
    last = weights["norm"] + weights["output"] if last_less is None else last_less * average
    costs = [weights[name] for name in layers]
    costs[0] += first
    costs[-1] += last
    parts = [layers[start:end] for start, end in pairwise(_even_cuts(tuple(costs), stages))]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


@lru_cache(maxsize=256)
def _even_cuts(costs: tuple[float, ...], parts: int) -> list[int]:
    """Borders [0, ..., len(costs)] of the contiguous parts; dynamic programming, twice."""
    sums = [0.0, *accumulate(costs)]

    def best(cost_of_two: Literal["max", "sum"], limit: float) -> tuple[float, list[int]]:
        # For each end, the cost of the best cut of costs[:end] into the parts so far.
        found: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
        for part in range(1, parts + 1):
            nearer: dict[int, tuple[float, list[int]]] = {}
            for end in range(part, len(costs) - (parts - part) + 1):
                for start, (cost, cuts) in found.items():
                    own = sums[end] - sums[start]
                    if start >= end or own > limit:
                        continue
                    total = max(cost, own) if cost_of_two == "max" else cost + own * own
                    if end not in nearer or total < nearer[end][0]:
                        nearer[end] = (total, [*cuts, end])
            found = nearer
        return found[len(costs)]

    heaviest, _ = best("max", math.inf)
    return best("sum", heaviest * (1 + 1e-9))[1]


# --- rules ----------------------------------------------------------------------------------------


def problems(
    parallelism: Parallelism, *, num_layers: int, local_batch_size: int
) -> list[str | Mistake]:
    """Returns one line for each rule that a pipeline of this configuration breaks."""
    if parallelism.pipeline_parallel_degree == 1:
        return []
    return list(_stage_problems(parallelism, num_layers)) or [
        *_module_problems(parallelism, num_layers),
        *_microbatch_problems(parallelism, num_stages(parallelism, num_layers), local_batch_size),
    ]


def _stage_problems(parallelism: Parallelism, num_layers: int) -> Iterator[str]:
    schedule, ranks = schedule_of(parallelism), parallelism.pipeline_parallel_degree
    stages, per_rank = num_stages(parallelism, num_layers), _default_per_rank(schedule)
    loop, size = schedule.placement == "loop", parallelism.pipeline_parallel_layers_per_stage
    fits = stages % ranks == 0 if loop else stages == ranks * per_rank
    if fits and 0 < stages <= num_layers:
        return
    if parallelism.module_fqns_per_model_part is not None:
        key, remedy = "module_fqns_per_model_part", "choose as many lists"
    elif size is not None:
        key, remedy = (
            f"pipeline_parallel_layers_per_stage={size}",
            "choose another, or leave it out",
        )
    else:
        key, most = f"pipeline_parallel_degree={ranks}", num_layers // per_rank
        remedy = f"choose a degree of at most {most}"
    wanted = f"a multiple of {ranks}" if loop else ranks * per_rank
    yield (
        f"parallelism.{key} with {schedule.name} makes {stages} stages of {num_layers} layers, and "
        f"{ranks} ranks want {wanted}, each of at least one layer: {remedy}"
    )


def _module_problems(parallelism: Parallelism, num_layers: int) -> Iterator[str]:
    """Yields a line unless each module is listed once, in order, with a layer in every stage."""
    parts, key = parallelism.module_fqns_per_model_part, "parallelism.module_fqns_per_model_part"
    listed, wanted = [name for part in parts or [] for name in part], module_names(num_layers)
    if parts is None:
        return
    if listed != wanted:
        wrong = [name for name in dict.fromkeys(wanted + listed) if listed.count(name) != 1]
        wrong += [name for name in dict.fromkeys(listed) if name not in wanted]
        yield (
            f"{key} must name tok_embeddings, layers.0 to layers.{num_layers - 1}, norm and output "
            f"once each, in this order: mend {', '.join(dict.fromkeys(wrong)) or 'the order'}"
        )
    elif not all(any(name.startswith("layers.") for name in part) for part in parts):
        yield f"{key} has a stage without a layer: give it one"


def _microbatch_problems(
    parallelism: Parallelism, stages: int, local_batch_size: int
) -> Iterator[Mistake]:
    schedule, ranks = schedule_of(parallelism), parallelism.pipeline_parallel_degree
    size = parallelism.pipeline_parallel_microbatch_size
    count, rest = divmod(local_batch_size, size)
    more = (n for n in count_from(count + 1) if runs(schedule, n, ranks=ranks, stages=stages))
    choice = {"training.local_batch_size": next(more) * size}
    remedies = [[choice, choice | {"training.global_batch_size": -1}]]
    otherwise = f"choose local_batch_size {choice['training.local_batch_size']}"
    if rest:
        yield Mistake(
            f"training.local_batch_size={local_batch_size} must be a multiple of "
            f"parallelism.pipeline_parallel_microbatch_size={size}",
            *(remedies, otherwise),
        )
    elif not runs(schedule, count, ranks=ranks, stages=stages):
        rule = (
            f"at least as many microbatches as its {stages} stages"
            if schedule.microbatches == "stages"
            else f"a multiple of {count // ranks} microbatches, its rounds over {ranks} ranks"
        )
        yield Mistake(
            f"training.local_batch_size={local_batch_size} makes {count} microbatches of "
            f"pipeline_parallel_microbatch_size={size}: {schedule.name} wants {rule}",
            *(remedies, otherwise),
        )


def runs(schedule: Schedule, microbatches: int, *, ranks: int, stages: int) -> bool:
    """Returns whether torch accepts this many microbatches."""
    if schedule.microbatches == "stages":
        return microbatches >= stages
    if schedule.microbatches == "rounds":
        return microbatches % max(1, microbatches // ranks) == 0
    return microbatches >= 1
