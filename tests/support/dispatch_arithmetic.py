"""What dispatch must send, by arithmetic on where one process' tokens go."""

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.verify.layouts.layouts import AXES, Layout

BYTES = 8  # Of a float64 and of an int64.
TOP_K = 4
LAYERS = 3
# Qwen3 has no shared experts, whose traffic over tp is none of dispatch's.
CONFIG = "configs/debug/gate_qwen3.toml"

Destinations = Callable[[int], Tensor]
"""Rank -> the ep coordinates of its tokens' experts, [T, K]."""


def degrees(layout: Layout) -> ParallelDims:
    return ParallelDims(layout.world_size, **{axis: layout.size(axis) for axis in AXES})


def buffers(layout: Layout, decisions: list[int]) -> list[int]:
    """Rows of a bounded buffer at each decision, of so many tokens."""
    ep = layout.ep
    factor, most = (0.97 * ep if ep > 1 else 1.0), min(TOP_K, 8 // ep)
    return [min(math.ceil(factor * t * TOP_K / ep), t * most) for t in decisions]


class Load(NamedTuple):
    """What the ranks of one ep group send each other, [source, destination]."""

    choices: Tensor
    """(token, expert) choices."""
    pairs: Tensor
    """Tokens with a choice there."""
    nodes: Tensor
    """Tokens with a choice on a node of two ranks: [source, node]."""


def load(ranks: tuple[int, ...], destinations: Destinations) -> Load:
    num = len(ranks)
    choices, pairs = torch.zeros(2, num, num, dtype=torch.int64)
    nodes = torch.zeros(num, max(1, num // 2), dtype=torch.int64)
    for source, rank in enumerate(ranks):
        places_TK = destinations(rank)
        choices[source] = torch.bincount(places_TK.flatten(), minlength=num)
        for place in range(num):
            pairs[source, place] = (places_TK == place).any(1).sum()
        for node in range(nodes.shape[1]):
            nodes[source, node] = (places_TK // 2 == node).any(1).sum()
    return Load(choices, pairs, nodes)


def expected(
    layout: Layout, rank: int, dim: int, decisions: list[int], destinations: Destinations
) -> Counter:
    """Bytes that leave a rank, by arithmetic. `decisions`: the tokens of each."""
    dims = degrees(layout)
    ep, etp = (dims.group_of(rank, axis) for axis in ("ep", "etp"))
    own = dims.coordinate(rank, "ep")
    among, slices = load(ep, destinations), len(etp) - 1
    choices = among.choices
    rows = among.choices if layout.dispatch == "standard" else among.pairs
    if layout.dispatch == "bounded":
        choices = rows = torch.full_like(choices, sum(buffers(layout, decisions)))
    others = torch.arange(len(ep)) != own
    out_rows, out_choices = int(rows[own][others].sum()), int(choices[own][others].sum())
    in_rows, in_choices = int(rows[others, own].sum()), int(choices[others, own].sum())

    def here(at: int, what: Tensor | None = None) -> int:
        """Rows (or choices) that arrive at a rank of the etp group."""
        if layout.dispatch == "bounded":
            return int(rows[:, own].sum())
        other = load(dims.group_of(at, "ep"), destinations)
        wanted = other.choices if what is choices or layout.dispatch == "standard" else other.pairs
        return int(wanted[:, own].sum())

    counts, number = 8 // len(ep), 0  # Numbers exchanged first, and bytes of each choice then.
    if layout.dispatch in ("deduplicated", "nodes"):
        counts, number = counts + 1, 4
    gathered = counts + (layout.dispatch == "bounded")
    width, ints = dim * BYTES, len(decisions) * BYTES
    found: Counter = Counter()
    if layout.dispatch == "nodes" and len(ep) > 2:
        counts += 1 + 2  # Rows for a node, and for each of its ranks.
        found += _by_nodes(among, ep, own, width)
    else:
        found["forward", ep] += (out_rows + in_rows) * width
        found["backward", ep] += (out_rows + in_rows) * width
    found["forward", ep] += ints * counts * (len(ep) - 1) + out_choices * (BYTES + number)
    found["backward", ep] += in_choices * BYTES
    reduced = sum(here(other) for other in etp if other != rank)
    weighed = sum(here(other, choices) for other in etp if other != rank)
    found["forward", etp] += slices * (
        ints * gathered * len(ep) + here(rank) * width + here(rank, choices) * (BYTES + number)
    )
    found["forward", etp] += reduced * width
    found["backward", etp] += slices * here(rank) * width + reduced * width + weighed * BYTES
    return +found


def _by_nodes(among: Load, ep: tuple[int, ...], own: int, width: int) -> Counter:
    """Rows and the numbers of the ranks that they go on to, by way of two ranks of a node."""
    nodes, node = len(ep) // 2, own // 2
    across, within = ep[own % 2 :: 2], ep[2 * node : 2 * node + 2]
    elsewhere = [other for other in range(nodes) if other != node]
    out = sum(int(among.nodes[own, other]) for other in elsewhere)
    back = sum(int(among.nodes[2 * other + own % 2, node]) for other in elsewhere)
    mate = 2 * node + 1 - own % 2
    # By way of this rank to the other one here, and by way of that one to this.
    onward = int(among.pairs[own % 2 :: 2, mate].sum())
    hither = int(among.pairs[1 - own % 2 :: 2, own].sum())
    found: Counter = Counter()
    for phase in ("forward", "backward"):
        found[phase, across] += (out + back) * width
        found[phase, within] += (onward + hither) * width
    found["forward", across] += out * 2
    return found


class Border(torch.autograd.Function):
    """Tells a counter which phase begins here, in the forward and in the backward."""

    @staticmethod
    def forward(ctx, x, counter, before, after):
        ctx.counter, ctx.after = counter, after
        counter.phase = before
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.counter.phase = ctx.after
        return grad, None, None, None
