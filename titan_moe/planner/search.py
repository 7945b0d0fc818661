"""Finds the layouts that fit some GPUs, fastest first by the estimate of a step's time.

Degrees are looked at in the order of a bound that no choice of theirs can beat: a step without
recomputation, host, bubble and travel of parameters, with the largest microbatches, spread evenly
over a pipeline. The search ends where the bound of the next degrees is above the times that it has.
Degrees, and schedules and microbatches of theirs, have no choice that fits if their thriftiest one
does not. Tests compare this with a search of everything. Imports no torch.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from titan_moe.checks.job import breaks_rule
from titan_moe.config.job_config import DEGREES, JobConfig
from titan_moe.config.pipeline import SCHEDULES
from titan_moe.models.config import ModelConfig
from titan_moe.parallelize.memory import MARGIN, RESERVED, Memory, memory
from titan_moe.parallelize.memory_table import SKEW
from titan_moe.parallelize.plan import Plan
from titan_moe.parallelize.policies import make_plan
from titan_moe.planner.load import Load
from titan_moe.planner.step_time import Seconds, bubble, least_seconds, step_time
from titan_moe.runtime.gpus import Device

_MICROBATCHES = (1, 2, 4, 8, 16)
"""Sequences of a microbatch that are tried."""
_SCHEDULES = [name for name in SCHEDULES if name not in ("GPipe", "LoopedBFS")]
"""Schedules that are tried: two keep more than 1F1B and Interleaved1F1B, and wait as long."""
_KEEPS = {"keep_attention": False, "keep_exchanged_rows": False}
_RECOMPUTE: tuple[dict[str, Any], ...] = (
    {"mode": "none"},
    {"mode": "selective", "selective_ac_option": "op"},
    {"mode": "selective", "selective_ac_option": "2"},
    {"mode": "full", **dict.fromkeys(_KEEPS, True)},
    *({"mode": "full", **{key: True}} for key in _KEEPS),
    {"mode": "full"},
)
"""Ways to recompute: the first one takes least time, the last one least memory."""
Tables = dict[str, dict[str, Any]]
"""Values by table and key of a configuration."""


@dataclass(frozen=True)
class Layout:
    """One way to run a job, and what is expected of it."""

    plan: Plan
    tables: Tables
    """Keys that it sets in the job."""
    seconds: Seconds
    memory: Memory
    """With the busiest rank of the load."""
    device: Device

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def degrees(self) -> str:
        """The degrees above 1, such as "pp=2 ep=8"; dp_shard takes the rest."""
        sizes = {axis: getattr(self.plan.dims, axis) for axis in DEGREES}
        words = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
        return " ".join(words) or "dp_shard=1"


@dataclass
class Search:
    """Holds the results of a search."""

    layouts: list[Layout] = field(default_factory=list)
    """The best choice of each degrees, fastest first."""
    too_large: list[Layout] = field(default_factory=list)
    """The thriftiest choice of degrees that do not fit, the nearest to fitting first."""
    num_degrees: int = 0
    """Legal degrees."""
    num_layouts: int = 0
    """Choices whose time was estimated."""
    slower: int = 0
    """Degrees that were left out because no choice of theirs can be among the layouts."""


@dataclass(frozen=True)
class Question:
    """A job, and the devices that it is to run on."""

    job: JobConfig
    """With a global batch size; its degrees are replaced."""
    model: ModelConfig
    ranks: int
    device: Device
    load: Load

    @property
    def usable(self) -> float:
        """Bytes of a device that an estimate may take; the ranks of a CPU share its memory."""
        device = self.device
        if device.cores:  # Without CUDA, whose memory estimates have.
            return device.memory / self.ranks + RESERVED
        return device.memory - MARGIN

    def plan(self, tables: Tables) -> Plan | None:
        """Returns the plan of the job with these keys; None if a rule forbids it."""
        job = self.job.with_values(**tables)
        if breaks_rule(job, self.model, self.ranks):
            return None
        device, on_node = self.device, min(self.device.node, self.ranks)
        options: dict[str, Any] = {"device_type": "cuda", "device_bytes": device.memory}
        if device.cores:
            options = {"device_type": "cpu"}
        return make_plan(job, self.model, self.ranks, ranks_per_node=on_node, **options)

    def needs(self, plan: Plan) -> Memory:
        """Returns the memory of a plan, for the load or for the skew that other estimates assume,
        whichever is more."""
        rows = plan.job.training.seq_len * (self.model.moe.top_k if self.model.moe else 1)
        found = memory(plan, max(SKEW, self.load.busiest(plan.dims.ep, rows)[1]))
        return replace(found, communicators=0.0) if self.device.cores else found

    def least(self, degrees: Mapping[str, int], tables: Tables) -> float:
        """Returns the seconds that no choice of these degrees is below, besides the bubble of a
        pipeline. `tables`: a legal choice."""
        ways = _dispatches(self, degrees)
        keys = ({**tables, "parallelism": tables["parallelism"] | way} for way in ways)
        plans, most = map(self.plan, keys), _MICROBATCHES[-1]
        return min(least_seconds(each, self.device, self.load, most) for each in plans if each)


def search(question: Question, *, keep: int = 10, worst: float = math.inf) -> Search:
    """Returns the best layouts, those of `keep` degrees at most, in less than `worst` seconds."""
    found = Search()
    bounds: list[tuple[float, int, dict[str, int]]] = []
    for degrees in legal_degrees(question):
        least = _thriftiest(question, degrees, frames(question, degrees))
        if least is None:
            continue
        found.num_degrees += 1
        if least.memory.needed > question.usable:
            found.too_large.append(least)
        else:
            bounds.append((question.least(degrees, least.tables), len(bounds), degrees))
    for number, (bound, _, degrees) in enumerate(sorted(bounds)):
        if len(found.layouts) == keep:
            worst = found.layouts[-1].step_seconds
        if bound >= worst:
            found.slower = len(bounds) - number
            break
        best, count = fastest(question, degrees, bound=bound, worst=worst)
        found.num_layouts += count
        if best is not None:
            found.layouts = sorted([*found.layouts, best], key=_order)[:keep]
    found.too_large.sort(key=lambda each: each.memory.needed)
    return found


def fastest(
    question: Question,
    degrees: Mapping[str, int],
    *,
    bound: float = 0.0,
    worst: float = math.inf,
) -> tuple[Layout | None, int]:
    """Returns the fastest choice of these degrees that fits, None if none does in less than `worst`
    seconds, and how many choices were estimated. `bound`: the seconds that each takes besides its
    bubble."""
    choices: list[tuple[float, int, Plan, Tables, Seconds]] = []
    count = 0
    for frame in frames(question, degrees):
        fits = False
        for total, plan, keys, seconds in _timed(question, degrees, frame, bound, worst):
            count += 1
            if total < worst:
                fits = fits or _some_fit(question, degrees, [frame])
                if not fits:
                    break
                choices.append((total, count, plan, keys, seconds))
    for total, _, plan, keys, seconds in sorted(choices, key=lambda each: each[:2]):
        if total >= worst:
            break
        if (needs := question.needs(plan)).needed <= question.usable:
            return Layout(plan, keys, seconds, needs, question.device), count
    return None, count


def _timed(
    question: Question, degrees: Mapping[str, int], frame: Tables, bound: float, worst: float
) -> Iterator[tuple[float, Plan, Tables, Seconds]]:
    """Yields the choices in a frame with their seconds, besides those that are slower than others
    that take `worst`. `bound`: as of `fastest`."""
    for ways in variants(question, degrees, frame):
        for keys in ways:
            if (plan := question.plan(keys)) is not None:
                if bound / (1 - bubble(plan)) >= worst:
                    return
                seconds = step_time(plan, question.device, question.load)
                total = sum(seconds.values())
                yield total, plan, keys, seconds
            if keys is ways[0] and (plan is None or total >= worst):
                break  # Recomputation makes nothing legal, and only takes longer.


def fits(question: Question) -> bool:
    """Returns whether some layout fits."""
    found = legal_degrees(question)
    return any(_some_fit(question, each, frames(question, each)) for each in found)


def _some_fit(question: Question, degrees: Mapping[str, int], of: Iterable[Tables]) -> bool:
    least = _thriftiest(question, degrees, of)
    return least is not None and least.memory.needed <= question.usable


def _order(layout: Layout) -> tuple[float, float]:
    return layout.step_seconds, layout.memory.needed


def legal_degrees(question: Question) -> Iterator[dict[str, int]]:
    """Yields the degrees of all axes that divide the ranks, the experts and the heads."""
    model, ranks = question.model, question.ranks
    whole = [n for n in range(1, ranks + 1) if ranks % n == 0]
    experts = [n for n in whole if model.moe and model.moe.num_experts % n == 0] or [1]
    heads = [n for n in whole if all(each.num_kv_heads % n == 0 for each in model.attentions)]
    layers = [n for n in whole if n <= model.num_layers]
    for pp, dp_replicate, cp, tp in product(layers, whole, whole, heads):
        rest, left = divmod(ranks, pp * dp_replicate * cp * tp)
        if left or not rest:
            continue
        for ep, etp in product(experts, whole if model.moe else [1]):
            if rest * cp * tp % (ep * etp) == 0:
                sizes = (pp, dp_replicate, rest, cp, tp, ep, etp)
                yield dict(zip(DEGREES, sizes, strict=True))


def frames(question: Question, degrees: Mapping[str, int]) -> Iterator[Tables]:
    """Yields the schedules, microbatches, and ways to reduce gradients that these degrees have; the
    first one needs least memory."""
    pp, chosen = degrees["pp"], question.job.parallelism.fsdp_accumulation
    fsdp = degrees["dp_shard"] * degrees["cp"]
    of_experts = fsdp * degrees["tp"] == degrees["ep"] * degrees["etp"]
    alone = degrees["dp_replicate"] == 1 and (fsdp == 1 or of_experts)
    shares = ["reduce_each", *["keep_unsharded"] * alone, "keep_gathered"] if pp == 1 else ["auto"]
    for schedule, (local, size), share in product(
        _SCHEDULES if pp > 1 else ["1F1B"],
        _batches(question, degrees),
        shares if chosen == "auto" else [chosen],
    ):
        yield {
            "parallelism": {
                "pipeline_parallel_schedule": schedule,
                "pipeline_parallel_microbatch_size": size,
                "fsdp_accumulation": share,
            },
            "training": {"local_batch_size": local},
        }


def variants(
    question: Question, degrees: Mapping[str, int], frame: Tables
) -> Iterator[list[Tables]]:
    """Yields for each dispatch all ways to recompute, the one that takes least time first."""
    keys, routed = frame["parallelism"], degrees["ep"] * degrees["etp"] > 1
    splits = degrees["pp"] > 1 and SCHEDULES[keys["pipeline_parallel_schedule"]].splits_backward
    ways = [each for each in _RECOMPUTE if routed or not each.get("keep_exchanged_rows")]
    for dispatch in _dispatches(question, degrees):
        tables = frame | {"parallelism": keys | dispatch}
        # A split backward recomputes nothing.
        yield [
            tables | {"activation_checkpoint": _KEEPS | w} for w in (ways[:1] if splits else ways)
        ]


def thrifty(question: Question, degrees: Mapping[str, int], frame: Tables) -> list[Tables]:
    """Returns the choices in a frame of which one needs least memory: a dispatcher each."""
    least = [ways[-1] for ways in variants(question, degrees, frame)]
    first = least[0]["parallelism"]
    same = ("expert_parallel_overlap", "context_parallel_rotate_method")
    return [keys for keys in least if all(keys["parallelism"][k] == first[k] for k in same)]


def _dispatches(question: Question, degrees: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yields keys of [parallelism]: the degrees, and how tokens and keys of cp travel."""
    parallelism, routed = question.job.parallelism, degrees["ep"] * degrees["etp"] > 1
    chosen = parallelism.expert_parallel_comm_backend, parallelism.expert_parallel_capacity_factor
    backends: list[str] = [chosen[0]]
    if routed and chosen == ("auto", None):
        lends = degrees["ep"] > 1 and question.load.shares_LE
        backends = ["standard", "deduplicated"] + ["balanced"] * bool(lends)
    for backend, overlap, method in product(
        backends,
        [False, True] if routed else [False],
        ["allgather", "ulysses", "ring"] if degrees["cp"] > 1 else ["allgather"],
    ):
        keys: dict[str, Any] = {DEGREES[axis]: size for axis, size in degrees.items()}
        keys |= {"expert_parallel_comm_backend": backend, "expert_parallel_overlap": overlap}
        yield keys | {"context_parallel_rotate_method": method}


def _batches(question: Question, degrees: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Yields (local_batch_size, pipeline_parallel_microbatch_size), the least memory first."""
    data_ranks = degrees["dp_replicate"] * degrees["dp_shard"]
    own, left = divmod(question.job.training.global_batch_size, data_ranks)
    sizes = [n for n in _MICROBATCHES if own % n == 0] if not left else []
    if degrees["pp"] == 1:
        yield from ((size, 1) for size in sizes)
        return
    for size in sizes:
        runs = own // size
        while runs % 2 == 0 and runs // 2 >= degrees["pp"]:
            runs //= 2
        while own % (runs * size) == 0 and runs * size <= own:
            yield runs * size, size
            runs *= 2


def _thriftiest(
    question: Question, degrees: Mapping[str, int], of: Iterable[Tables]
) -> Layout | None:
    """Returns the first choice in some frames that fits, else the one that needs least memory. Of a
    schedule's frames the first one that is legal is looked at."""
    found: dict[str, Layout] = {}
    for frame in of:
        schedule = frame["parallelism"]["pipeline_parallel_schedule"]
        if schedule in found:
            continue
        plans = [(question.plan(keys), keys) for keys in thrifty(question, degrees, frame)]
        for plan, keys in plans:
            if plan is None:
                continue
            layout = Layout(plan, keys, {}, question.needs(plan), question.device)
            if layout.memory.needed <= question.usable:
                return layout
            best = found.get(schedule, layout)
            found[schedule] = min(layout, best, key=lambda each: each.memory.needed)
    return min(found.values(), key=lambda each: each.memory.needed, default=None)
