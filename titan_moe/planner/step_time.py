"""Estimates by arithmetic how long a step takes, region by region. Imports no torch.

The rank that all others wait for is counted: the busiest of the experts under a load, and in a
pipeline the one with most to compute. A region takes the longer of its arithmetic and of the bytes
that it reads and writes (a roofline, Williams et al. 2009). Rules of overlap are the program's:

- FSDP gathers a layer's parameters, and reduces their gradients, beside the layer next to it: what
  its computation does not cover is exposed.
- Exchanges of tokens are exposed whole; with `expert_parallel_overlap` one half travels beside the
  experts of the other, and DualPipeV runs one chunk's exchanges beside another chunk.
- Collectives of tp are exposed; those of a ring pass beside attention.
- Where a device finishes a layer before its host has issued it, the host's time is what counts.

On a CPU nothing is beside anything: each rank is one thread, ranks share the machine's cores, and
collectives are work of these cores. So all regions add up, and R ranks on C cores take max(1, R/C)
times as long as one rank with a core for itself. In a pipeline the ranks' mean work is shared so: a
step lasts as long as that, or as its slowest rank with the bubble, whichever is more.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from titan_moe.config.pipeline import (
    bubble_fraction,
    num_microbatches,
    overlaps_chunks,
    schedule_of,
)
from titan_moe.models.config import RecurrentConfig
from titan_moe.models.stats import kinds_of_layers, layer_products, part_sizes
from titan_moe.moe.config import places_reached
from titan_moe.parallelize.activations import values_per_token
from titan_moe.parallelize.plan import BYTES, Plan
from titan_moe.planner.links import links_of
from titan_moe.planner.load import Load
from titan_moe.runtime.gpus import Device

Seconds = dict[str, float]
"""Seconds by region."""
KINDS: Mapping[str, tuple[str, ...]] = {
    "arithmetic": ("products", "experts", "attention", "output"),
    "memory": ("elementwise", "rows", "optimizer"),
    "links": ("exchange", "tensor", "context", "parameters", "stages"),
    "bubble": ("bubble",),
    "host": ("host",),
}
"""Regions by what bounds them."""
REGIONS = tuple(region for regions in KINDS.values() for region in regions)
_ROW_PASSES = 6
"""Times that a routed row is read or written beside its products, forward: it is gathered to be
sent, put in the experts' order, and back again. Half of it where its experts are."""
_LOAN_PASSES = 6
"""Times that a rank's experts are read or written in each pass if they are lent: they are copied to
be sent, and joined with borrowed ones; their gradients likewise."""
_TILE = 64
"""Rows and columns of a tile of grouped products: smaller sizes cost as much."""
DISPATCHES, _DISPATCHES_COMPILED = {"dense": 75, "routed": 130}, 0.4
"""Operations of a layer's forward that the host issues, a third of those of both passes, and the
share of them that compiled layers leave. A layer of both kinds, with tp and ep, was counted at 612
in both passes."""
_GATHER_PASSES, _REDUCE_PASSES, _ADD_PASSES = 4, 5, 3
"""Times that a CPU reads or writes a layer's parameters: to fill FSDP's buffer and to copy them
out; to fill the buffer that is sent and the one that comes, and to add up its parts; and to add a
microbatch's gradients to those of others."""
_WAIT = 4
"""Dispatches' time that a wait for the sizes of an exchange costs the host."""


class Microbatch(NamedTuple):
    """One rank's part of a microbatch."""

    sequences: int
    tokens: float
    """Tokens of its sequences' segments; tp shares them."""
    own: float
    """Tokens between layers: a part of tp."""
    busiest: float
    """Rows of the busiest rank's experts, as a multiple of an even share."""
    lends: bool
    """Ranks lend each other experts."""


def step_time(plan: Plan, device: Device, load: Load) -> Seconds:
    """Returns the seconds of one optimizer step by region, those of all `REGIONS`."""
    dims, job = plan.dims, plan.job
    piped, local = dims.pp > 1, job.training.local_batch_size
    size = job.parallelism.pipeline_parallel_microbatch_size if piped else local
    runs = max(job.training.global_batch_size // (dims.size("batch") * local), 1)
    count = runs * (local // size)
    batch = _microbatch(plan, size, load)
    ranks = [tuple(name for n in own for name in plan.stages[n]) for own in plan.stages_of_ranks]
    kinds = kinds_of_layers(plan.config, tuple(name for stage in plan.stages for name in stage))
    layers = {kind: _layer(plan, device, batch, kind, count) for kind in kinds}
    times = {
        each: _rank_time(plan, device, batch, each, layers, count) for each in dict.fromkeys(ranks)
    }
    slowest = max(times.values(), key=lambda seconds: sum(seconds.values()))
    seconds = {region: one * count for region, one in slowest.items()}
    waits, busy, optimizer = bubble(plan), sum(seconds.values()), _optimizer(plan, device)
    bubble_s = busy * waits / (1 - waits)
    if device.cores:
        mean = count * sum(sum(times[each].values()) for each in ranks) / len(ranks)
        crowd = max(dims.world_size / device.cores * mean / busy, 1.0)
        seconds = {region: value * crowd for region, value in seconds.items()}
        bubble_s = max(bubble_s - busy * (crowd - 1), 0.0)
        optimizer *= max(dims.world_size / device.cores, 1.0)
    return seconds | {"bubble": bubble_s, "optimizer": optimizer}


def bubble(plan: Plan) -> float:
    """Returns the share of its time in which a rank of a pipeline waits; 0 without one."""
    if plan.dims.pp == 1:
        return 0.0
    parallelism, local = plan.job.parallelism, plan.job.training.local_batch_size
    schedule, count = schedule_of(parallelism), num_microbatches(parallelism, local)
    return bubble_fraction(schedule, plan.dims.pp, sum(map(len, plan.stages_of_ranks)), count)


def least_seconds(plan: Plan, device: Device, load: Load, most: int) -> float:
    """Returns the seconds that no choice of schedule, microbatches and recompute is below, for the
    degrees and the dispatch of a plan, besides the bubble of a pipeline and the optimizer: what
    cannot be avoided in all modules, spread evenly over the pipeline, in microbatches of at most
    `most` sequences."""
    dims, job = plan.dims, plan.job
    sequences = max(job.training.global_batch_size // dims.size("batch"), 1)
    size = min(sequences, most)
    recompute = job.activation_checkpoint.model_copy(update={"mode": "none"})
    plan = replace(plan, job=job.model_copy(update={"activation_checkpoint": recompute}))
    names = tuple(name for stage in plan.stages for name in stage)
    batch = _microbatch(plan, size, load)
    kinds = kinds_of_layers(plan.config, names)
    layers = {kind: _layer(plan, device, batch, kind, 1) for kind in kinds}
    seconds = _rank_time(plan, device, batch, names, layers, 1)
    seconds["parameters"] = seconds["host"] = seconds["stages"] = 0.0
    if dims.pp > 1:  # DualPipeV may hide it.
        seconds["exchange"] = 0.0
    return sum(seconds.values()) * (sequences / size) / dims.pp


def bound_by(seconds: Seconds) -> str:
    """Returns what the largest share of a step's time goes to: a key of `KINDS`."""
    shares = {kind: sum(seconds[each] for each in regions) for kind, regions in KINDS.items()}
    return max(shares, key=lambda kind: shares[kind])


def _microbatch(plan: Plan, sequences: int, load: Load) -> Microbatch:
    tokens = sequences * plan.job.training.seq_len / plan.dims.cp
    own, top_k = tokens / plan.dims.tp, plan.config.moe.top_k if plan.config.moe else 1
    busiest = load.busiest(plan.dims.ep, own * top_k)[0]
    lends = plan.dispatch.name == "balanced" and busiest > 1
    return Microbatch(sequences, tokens, own, 1.0 if lends else busiest, lends)


def _rank_time(
    plan: Plan,
    device: Device,
    batch: Microbatch,
    modules: tuple[str, ...],
    layers: Mapping[int, Seconds],
    count: int,
) -> Seconds:
    """Returns the seconds of one of `count` microbatches in some modules of a rank. `layers`: those
    of a layer of each kind."""
    total = dict.fromkeys(REGIONS, 0.0)
    if "output" in modules:
        _add(total, _output(plan, device, batch, count))
    for layer, number in kinds_of_layers(plan.config, modules).items():
        _add(total, layers[layer], number)
    if plan.dims.pp > 1:
        config = plan.config
        moved = batch.own * config.dim * config.streams * BYTES[plan.types.compute]
        hop = moved / (device.network * device.reach) + device.latency
        total["stages"] += 2 * hop
    return total


def _add(total: Seconds, seconds: Seconds, times: float = 1.0) -> None:
    for region, value in seconds.items():
        total[region] += times * value


def _layer(plan: Plan, device: Device, batch: Microbatch, layer: int, count: int) -> Seconds:
    """Returns a layer's seconds in both passes of one microbatch."""
    recompute, forward = plan.job.activation_checkpoint, _forward(plan, device, batch, layer)
    factors = {"products": 2.0, "experts": 2.0, "attention": 2.5, "elementwise": 2.0}
    if plan.job.lora.rank is not None:  # Frozen weights have no gradients.
        factors |= {"products": 1.0, "experts": 1.0}
    backward = {region: s * factors.get(region, 1.0) for region, s in forward.items()}
    again = dict(forward)
    if recompute.by_operation:
        again = {x: s * (x in ("elementwise", "host")) for x, s in forward.items()}
    again["exchange"] *= 0 if recompute.keep_exchanged_rows else 0.5  # Rows come, and stay.
    again["attention"] *= not recompute.keep_attention
    share = 1.0 if recompute.by_operation else 1 / recompute.every if recompute.every else 0.0
    _add(backward, again, share)
    total = dict.fromkeys(REGIONS, 0.0)
    gathers, reduces, copies = _parameters(plan, device, layer)
    frees, overlaps = plan.reshard_after_forward, not device.cores
    rounds = count if plan.accumulation != "keep_gathered" and plan.dims.pp == 1 else 1
    for side, sent in (
        (forward, gathers * (rounds if frees else 1)),
        (backward, (gathers * frees + reduces) * rounds),
    ):
        busy = (sum(side.values()) - side["host"]) * overlaps
        _add(total, side)
        total["host"] += max(side["host"] - busy, 0.0) - side["host"]
        total["parameters"] += max(sent / count - max(busy, side["host"] * overlaps), 0.0)
    passes = 1 / count if plan.accumulation == "keep_unsharded" else (1 + frees) * rounds / count
    if device.cores:
        adds_up = rounds < count or plan.dims.world_size == 1
        passes = 1 + _ADD_PASSES * (1 - 1 / count) * adds_up
    total["parameters"] += copies * passes
    return total


def _forward(plan: Plan, device: Device, batch: Microbatch, layer: int) -> Seconds:
    """Returns the seconds of a layer's forward; "host" is all that the host takes."""
    config, dims, width = plan.config, plan.dims, BYTES[plan.types.compute]
    work = layer_products(config, layer, plan.job.training.seq_len)
    memory = device.bandwidth * device.reach
    tokens, seconds = batch.tokens / dims.tp, dict.fromkeys(REGIONS, 0.0)
    seconds["products"] = _roofline(
        device,
        2 * tokens * work.dense / (device.flops * device.products),
        width * work.dense / dims.tp / memory,
    )
    uneven = 2 - 1 / dims.cp if dims.cp > 1 and not plan.head_tail else 1.0
    seconds["attention"] = 2 * tokens * work.mixing * uneven / (device.flops * device.attention)
    values = values_per_token(config, layer, batch.busiest, dims.etp)
    seconds["elementwise"] = 2 * sum(values.values()) * batch.own * width / memory
    dispatches = float(DISPATCHES["dense"])
    if work.routed:
        moe = config.moe
        assert moe is not None
        rows = batch.own * moe.top_k * batch.busiest
        seconds["experts"] = _experts(plan, device, rows, work.routed)
        moved = _ROW_PASSES / 2 * (1 + dims.etp) * rows * config.row_dim
        seconds["exchange"] = _exchange(plan, device, batch, seconds["experts"])
        if batch.lends:  # A rank borrows as many experts as it has, of ranks anywhere.
            weights = work.routed / moe.top_k * moe.num_experts / (dims.ep * dims.etp)
            moved += _LOAN_PASSES * weights
            seconds["exchange"] += links_of(dims, "ep", device).exchange(*[weights * width] * 2)
        seconds["rows"] = moved * width / memory
        dispatches += DISPATCHES["routed"]
        waits = dims.ep > 1 and plan.dispatch.name in ("standard", "deduplicated", "balanced")
        dispatches += _WAIT * waits * plan.dispatch.num_chunks
    seconds["tensor"] = _tensor(plan, device, batch, layer)
    seconds["context"] = _context(plan, device, batch, layer, seconds["attention"])
    dispatches *= _DISPATCHES_COMPILED if plan.job.compile.compiles_layers else 1.0
    seconds["host"] = dispatches * device.dispatch
    return seconds


def _experts(plan: Plan, device: Device, rows: float, products: float) -> float:
    """Returns the seconds of a rank's experts in a forward. `rows`: an expert's rows, which all of
    its slices have, shared among these. `products`: multiplications of a token's rows."""
    config, dims, moe, width = plan.config, plan.dims, plan.config.moe, BYTES[plan.types.compute]
    assert moe is not None
    hidden, own = moe.hidden_dim / dims.etp, moe.num_experts / dims.ep
    padded = 1.0 if device.cores else _tiles(rows * dims.etp / own) * _tiles(hidden)
    flops = 2 * rows * products / moe.top_k * padded
    matrices = products / moe.top_k / dims.etp
    values = rows * dims.etp * (3 * config.row_dim + 3 * hidden)
    return _roofline(
        device,
        flops / (device.flops * device.experts),
        width * (own * matrices + values) / (device.bandwidth * device.reach),
    )


def _roofline(device: Device, arithmetic: float, memory: float) -> float:
    """Returns the seconds of products: a GPU reads beside its arithmetic, a CPU's thread before."""
    return arithmetic + memory if device.cores else max(arithmetic, memory)


def _tiles(size: float) -> float:
    """Returns how much of a dim a kernel computes, in whole tiles."""
    return math.ceil(size / _TILE) * _TILE / size


def _exchange(plan: Plan, device: Device, batch: Microbatch, experts: float) -> float:
    """Returns what is exposed of sending rows to experts and back, beside `experts` of compute."""
    config, dims, moe = plan.config, plan.dims, plan.config.moe
    links = links_of(dims, "ep", device)
    if moe is None or dims.ep * dims.etp == 1:
        return 0.0
    rows = between = float(moe.top_k)
    if plan.dispatch.name == "deduplicated":
        rows = places_reached(moe.top_k, dims.ep)
        between = places_reached(moe.top_k, dims.ep // links.on_node) if links.on_node > 1 else rows
    elements = batch.own * config.row_dim * dims.etp * batch.busiest
    scale = elements * BYTES[plan.types.compute]
    way = links.exchange(rows * scale, between * scale)
    way += links_of(dims, "etp", device).collective(rows * scale)
    if device.cores:  # Each forward sends the sizes too, and each backward none: on average half.
        return 2 * way + links.latency / 2
    if overlaps_chunks(plan.job.parallelism):
        return max(2 * way - experts, 0.0)
    if plan.dispatch.num_chunks > 1:  # The first half's way there and the last one's way back.
        return way + max(way - experts / 2, 0.0)
    return 2 * way


def _tensor(plan: Plan, device: Device, batch: Microbatch, layer: int) -> float:
    """Returns the seconds of tensor parallelism's gathers and reductions in a forward."""
    config, moe = plan.config, plan.config.moe
    fed = config.is_dense_layer(layer) or (moe is not None and moe.num_shared_experts > 0)
    sublayers = (config.mixer(layer) is not None) + fed
    num_bytes = batch.tokens * config.dim * BYTES[plan.types.compute]
    way = links_of(plan.dims, "tp", device).collective(num_bytes)
    # gloo makes a reduction to parts of one to copies.
    cost = 1.5 if device.cores else 0.3 if plan.pipelined_tp else 1.0
    return 2 * sublayers * way * cost


def _context(plan: Plan, device: Device, batch: Microbatch, layer: int, attends: float) -> float:
    """Returns what is exposed of context parallelism's exchanges in a forward."""
    mixer, dims = plan.config.mixer(layer), plan.dims
    if dims.cp == 1 or mixer is None or isinstance(mixer, RecurrentConfig):
        return 0.0
    links, width = links_of(dims, "cp", device), BYTES[plan.types.compute]
    keys = mixer.num_kv_heads * (mixer.qk_dim + mixer.v_dim) / dims.tp
    way = links.collective(batch.tokens * keys * width * dims.cp)
    method = plan.job.parallelism.context_parallel_rotate_method
    if method == "ring" and not device.cores:
        return max(way - attends, 0.0) + dims.cp * device.latency
    if method == "ulysses":
        queries = mixer.num_heads * (mixer.qk_dim + mixer.v_dim) / dims.tp
        num_bytes = batch.tokens * (queries + keys) * width
        return links.exchange(num_bytes, num_bytes) + 3 * device.latency
    return way


def _parameters(plan: Plan, device: Device, layer: int) -> tuple[float, float, float]:
    """Returns the seconds in which FSDP gathers a layer's parameters, in which it reduces their
    gradients, over replicas too, and in which a CPU reads or writes them once, or a GPU casts and
    then copies those that no other rank shards, which no exchange hides. A CPU's copies to and from
    FSDP's buffers count as well."""
    config, dims = plan.config, plan.dims
    size = part_sizes(config)[f"layers.{min(layer, config.num_layers - 1)}"]
    stored, compute = BYTES[plan.types.stored], BYTES[plan.types.compute]
    reduce, gathers, reduces, copies = max(stored, 4), 0.0, 0.0, 0.0
    parts = (size.dense / dims.tp, "fsdp"), (size.routed / (dims.ep * dims.etp), "edp")
    for (elements, axis), alone in zip(parts, plan.unsharded, strict=True):
        links = links_of(dims, axis, device)
        gathers += links.collective(elements * compute)
        reduces += links.collective(elements * reduce)
        seconds = elements * compute / (device.bandwidth * device.fresh)
        cast = 2 * compute + (stored + compute) * (stored != compute)
        cast *= dims.world_size > 1 or stored != compute  # Else one rank alone has no FSDP.
        gpu = alone * elements * cast / (device.bandwidth * device.reach)
        copies += seconds if device.cores else gpu
        if device.cores and dims.world_size > 1:  # One rank alone has no FSDP.
            gathers += _GATHER_PASSES * seconds
            reduces += _REDUCE_PASSES * seconds * (links.size > 1)
        replicas = links_of(dims, "dp_replicate", device)
        reduces += 2 * replicas.collective(elements * reduce / links.size)
    return gathers, reduces * (plan.job.lora.rank is None), copies


def _output(plan: Plan, device: Device, batch: Microbatch, count: int) -> Seconds:
    """Returns the seconds of logits and losses in both passes, of all depths of prediction."""
    config, dims, width = plan.config, plan.dims, BYTES[plan.types.compute]
    depths, vocabulary = 1 + config.num_mtp_layers, config.vocab_size / dims.tp
    flops = 6 * batch.tokens * config.dim * vocabulary
    passes = 6 * batch.tokens * vocabulary * width
    memory = device.bandwidth * device.reach
    links = links_of(dims, "fsdp", device)
    weight = vocabulary * config.dim
    sent = links.collective(weight * width) + links.collective(weight * 4)
    rounds = count if plan.accumulation != "keep_gathered" and dims.pp == 1 else 1
    seconds = depths * (flops / (device.flops * device.products) + passes / memory)
    # Both ends of the model are cut by vocabulary: two collectives for each, in both passes.
    way, ends = links_of(dims, "tp", device).collective(batch.tokens * config.dim * width), 1
    if device.cores:  # Nothing hides either end.
        passes = (_GATHER_PASSES + _REDUCE_PASSES) * (dims.world_size > 1)
        sent += passes * weight * width / (device.bandwidth * device.fresh)
        ends += dims.pp == 1
    return {
        "output": seconds,
        "tensor": 2 * way * (depths + (dims.pp == 1)),
        "parameters": max(ends * sent * rounds / count - seconds * (not device.cores), 0.0),
    }


def _optimizer(plan: Plan, device: Device) -> float:
    """Returns the seconds in which the optimizer reads and writes a rank's weights and moments."""
    dims, stored = plan.dims, BYTES[plan.types.stored]
    own = sum(map(sum, part_sizes(plan.config).values())) * dims.dp_replicate * dims.pp
    share = (plan.job.lora.rank is None) / dims.world_size
    moments = 2 if plan.job.optimizer.state_dtype == "bfloat16" else stored
    rate = device.link / 16 if plan.cpu_offload else device.bandwidth  # Over PCIe.
    passes = 3 * stored + 4 * moments
    if device.cores:  # The norm widens a copy of the gradients, and clipping scales them.
        passes += 3 * stored + 2 * BYTES["float64"]
    return own * share * passes / (rate * device.reach)
