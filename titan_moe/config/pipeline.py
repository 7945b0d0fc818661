"""Pipeline schedules as data, and how a model's layers become stages. Arithmetic only, no torch.

The schedules are those of torch.distributed.pipelining; `pipeline_order` knows what each rank does
when. Torch's own errors come from inside a running process, so the rules stand here as well.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from titan_moe.config.job_config import Parallelism


@dataclass(frozen=True)
class Schedule:
    """What is fixed about a schedule."""

    name: str
    placement: Literal["single", "loop", "v"]
    """'single': one stage a rank; 'loop': rank r holds stages r, r + P, ...; 'v': r and 2P-1-r."""
    splits_backward: bool
    """The gradients of weights come later than those of inputs, through autograd.grad."""
    microbatches: Literal["any", "stages", "rounds"]
    """'stages': at least as many as stages; 'rounds': a multiple of max(1, microbatches // P)."""


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("1F1B", "single", splits_backward=False, microbatches="stages"),
        Schedule("Interleaved1F1B", "loop", splits_backward=False, microbatches="rounds"),
        Schedule("GPipe", "single", splits_backward=False, microbatches="any"),
        Schedule("LoopedBFS", "loop", splits_backward=False, microbatches="any"),
        Schedule("InterleavedZeroBubble", "loop", splits_backward=True, microbatches="rounds"),
        Schedule("ZBVZeroBubble", "v", splits_backward=True, microbatches="any"),
        Schedule("DualPipeV", "v", splits_backward=True, microbatches="stages"),
    )
}


def schedule_of(parallelism: Parallelism) -> Schedule:
    return SCHEDULES[parallelism.pipeline_parallel_schedule]


def num_stages(parallelism: Parallelism, num_layers: int) -> int:
    """Stages of the whole pipeline; a multiple of the ranks once `problems` finds nothing."""
    if (parts := parallelism.module_fqns_per_model_part) is not None:
        return len(parts)
    if (size := parallelism.pipeline_parallel_layers_per_stage) is not None:
        return math.ceil(_layers_to_split(parallelism, num_layers) / size)
    return parallelism.pipeline_parallel_degree * _default_per_rank(schedule_of(parallelism))


def _default_per_rank(schedule: Schedule) -> int:
    return 1 if schedule.placement == "single" else 2


def _layers_to_split(parallelism: Parallelism, num_layers: int) -> int:
    """Layers, with what the embedding and the output are said to count as."""
    first = parallelism.pipeline_parallel_first_stage_less_layers or 0
    last = parallelism.pipeline_parallel_last_stage_less_layers or 0
    return num_layers + first + last


def stages_of_rank(schedule: Schedule, rank: int, num_ranks: int, stages: int) -> list[int]:
    """The stages that a rank of the pipeline holds, ascending."""
    if schedule.placement == "v":
        return [rank, 2 * num_ranks - 1 - rank]
    return list(range(rank, stages, num_ranks))


def num_microbatches(parallelism: Parallelism, local_batch_size: int) -> int:
    """Microbatches of one run of the schedule."""
    return local_batch_size // parallelism.pipeline_parallel_microbatch_size


# --- splitting ------------------------------------------------------------------------------------


def module_names(num_layers: int) -> list[str]:
    """The modules that stages divide among them, in the model's order."""
    layers = [f"layers.{layer}" for layer in range(num_layers)]
    return ["tok_embeddings", *layers, "norm", "output"]


def model_parts(
    parallelism: Parallelism, weights: Mapping[str, float], num_layers: int
) -> list[list[str]]:
    """The modules of each stage: as configured, or split by `weights` (see `split_parts`)."""
    if (parts := parallelism.module_fqns_per_model_part) is not None:
        return [list(part) for part in parts]
    return split_parts(
        weights,
        num_stages(parallelism, num_layers),
        first_less=parallelism.pipeline_parallel_first_stage_less_layers,
        last_less=parallelism.pipeline_parallel_last_stage_less_layers,
    )


def split_parts(
    weights: Mapping[str, float],
    stages: int,
    *,
    first_less: int | None = None,
    last_less: int | None = None,
) -> list[list[str]]:
    """Cut a model into stages of one or more layers so that the heaviest is as light as possible.

    Of all such cuts, the most even one (least sum of squares).

    Args:
        weights: the cost of each of `module_names`, in any unit.
        first_less, last_less: the embedding, or norm and output, cost as much as this many layers
            of average weight instead of their own.
    """
    layers = [name for name in weights if name.startswith("layers.")]
    assert len(layers) >= stages, f"{len(layers)} layers do not make {stages} stages"
    average = sum(weights[name] for name in layers) / len(layers)
    first = weights["tok_embeddings"] if first_less is None else first_less * average
    last = weights["norm"] + weights["output"] if last_less is None else last_less * average
    costs = [weights[name] for name in layers]
    costs[0] += first
    costs[-1] += last
    cuts = _even_cuts(costs, stages)
    parts = [layers[start:end] for start, end in pairwise(cuts)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _even_cuts(costs: Sequence[float], parts: int) -> list[int]:
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


def problems(parallelism: Parallelism, *, num_layers: int, local_batch_size: int) -> list[str]:
    """One line for each rule that a pipeline of this configuration breaks."""
    if parallelism.pipeline_parallel_degree == 1:
        return []
    found = _stage_problems(parallelism, num_layers)
    return found or [
        *_module_problems(parallelism, num_layers),
        *_microbatch_problems(parallelism, num_stages(parallelism, num_layers), local_batch_size),
    ]


def _stage_problems(parallelism: Parallelism, num_layers: int) -> list[str]:
    schedule, ranks = schedule_of(parallelism), parallelism.pipeline_parallel_degree
    stages = num_stages(parallelism, num_layers)
    wanted = _wanted_stages(schedule, ranks)
    exact = schedule.placement != "loop"
    fits = stages == ranks * _default_per_rank(schedule) if exact else stages % ranks == 0
    if parallelism.module_fqns_per_model_part is not None:
        if fits and stages:
            return []
        return [
            f"parallelism.module_fqns_per_model_part lists {stages} stages: {schedule.name} on "
            f"pipeline_parallel_degree={ranks} ranks wants {wanted}"
        ]
    size = parallelism.pipeline_parallel_layers_per_stage
    if stages > num_layers and size is None:
        return [
            f"parallelism.pipeline_parallel_degree={ranks} with {schedule.name} makes {stages} "
            f"stages of {num_layers} layers, each of at least one: choose "
            f"{_fewer_stages(schedule, ranks, num_layers)}"
        ]
    if fits and stages <= num_layers:
        return []
    return [
        f"parallelism.pipeline_parallel_layers_per_stage={size} makes {stages} stages of "
        f"{num_layers} layers: {schedule.name} on pipeline_parallel_degree={ranks} ranks wants "
        f"{wanted}, each of at least one layer: choose "
        f"{_stage_sizes(parallelism, num_layers)}"
    ]


def _wanted_stages(schedule: Schedule, ranks: int) -> str:
    if schedule.placement == "loop":
        return f"a multiple of {ranks}"
    return str(ranks * _default_per_rank(schedule))


def _fewer_stages(schedule: Schedule, ranks: int, num_layers: int) -> str:
    most = num_layers // _default_per_rank(schedule)
    choices = [f"a degree of at most {most}"] if most > 1 else ["another model"]
    if schedule.placement == "loop" and ranks <= num_layers:
        choices.append(f"pipeline_parallel_layers_per_stage={num_layers // ranks}")
    if schedule.placement != "single" and ranks <= num_layers:
        choices.append("pipeline_parallel_schedule=1F1B or GPipe, which have one stage a rank")
    return ", or ".join(choices)


def _stage_sizes(parallelism: Parallelism, num_layers: int) -> str:
    schedule, ranks = schedule_of(parallelism), parallelism.pipeline_parallel_degree
    layers = _layers_to_split(parallelism, num_layers)
    sizes = {math.ceil(layers / size): size for size in range(layers, 0, -1)}
    exact = ranks * _default_per_rank(schedule)
    legal = [
        f"{size} ({stages} stages)"
        for stages, size in sizes.items()
        if (stages % ranks == 0 if schedule.placement == "loop" else stages == exact)
        and stages <= num_layers
    ]
    return " or ".join(legal or ["none: leave it out"])


def _module_problems(parallelism: Parallelism, num_layers: int) -> list[str]:
    """Each module exactly once, in the model's order, a layer in every stage."""
    parts, key = parallelism.module_fqns_per_model_part, "parallelism.module_fqns_per_model_part"
    if parts is None:
        return []
    listed, wanted = [name for part in parts for name in part], module_names(num_layers)
    order = "tok_embeddings, layers.0, layers.1, ..., norm, output"
    found = [
        f"{key} names {name!r}, which is no part of this model: choose from {order}, up to layers."
        f"{num_layers - 1}" + _stays(name)
        for name in dict.fromkeys(listed)
        if name not in wanted
    ]
    for name in wanted:
        if (times := listed.count(name)) != 1:
            remedy = "add it" if times == 0 else "once is enough"
            found.append(f"{key} names {name!r} {times} times: {remedy}")
    if not found and listed != wanted:
        first = next(a for a, b in zip(listed, wanted, strict=True) if a != b)
        found = [f"{key} has {first!r} out of the model's order: keep {order}"]
    found += [
        f"{key}: stage {stage} ({', '.join(part) or 'empty'}) has no layer: give it one"
        for stage, part in enumerate(parts)
        if not any(name.startswith("layers.") for name in part)
    ]
    return found


def _stays(name: str) -> str:
    if name == "rope":
        return "; every stage has the rotations anyway"
    return "; it stays with the output layer" if name.split(".")[0] == "mtp" else ""


def _microbatch_problems(parallelism: Parallelism, stages: int, local_batch_size: int) -> list[str]:
    schedule, ranks = schedule_of(parallelism), parallelism.pipeline_parallel_degree
    size = parallelism.pipeline_parallel_microbatch_size
    if local_batch_size % size:
        return [
            f"training.local_batch_size={local_batch_size} must be a multiple of "
            f"parallelism.pipeline_parallel_microbatch_size={size}: choose "
            f"{(local_batch_size // size + 1) * size}"
        ]
    count = local_batch_size // size
    if runs(schedule, count, ranks=ranks, stages=stages):
        return []
    legal = [
        n for n in range(1, count + 2 * stages) if runs(schedule, n, ranks=ranks, stages=stages)
    ]
    below = [n for n in legal if n < count][-1:]
    above = [n for n in legal if n > count][:1]
    choices = " or ".join(str(n * size) for n in below + above)
    rule = (
        f"at least as many microbatches as its {stages} stages"
        if schedule.microbatches == "stages"
        else f"a multiple of {count // ranks} microbatches, its rounds over {ranks} ranks"
    )
    return [
        f"training.local_batch_size={local_batch_size} makes {count} microbatches of "
        f"pipeline_parallel_microbatch_size={size}: pipeline_parallel_schedule={schedule.name} "
        f"wants {rule}: choose local_batch_size {choices}"
    ]


def runs(schedule: Schedule, microbatches: int, *, ranks: int, stages: int) -> bool:
    """Whether torch accepts this many microbatches."""
    if schedule.microbatches == "stages":
        return microbatches >= stages
    if schedule.microbatches == "rounds":
        return microbatches % max(1, microbatches // ranks) == 0
    return microbatches >= 1
