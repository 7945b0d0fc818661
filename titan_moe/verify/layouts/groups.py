"""The process groups that each rank of a layout needs, from the layout's numbers alone."""

from collections.abc import Mapping
from functools import cache
from math import prod

import numpy as np

from titan_moe.verify.layouts.layouts import DENSE_AXES, Layout
from titan_moe.verify.layouts.shards import SPARSE_AXES

JOINED_AXES: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("dp_shard", "cp"),
    "sequence": ("cp", "tp"),
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}
TOKEN_AXES = ("pp", "cp", "tp", "sequence", "ep", "etp")
PARAMETER_AXES = ("dp_replicate", "fsdp", "edp")

Group = tuple[str, tuple[int, ...]]
"""A class of traffic, "tokens" or "parameters", and the ranks, ascending."""


def members(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    """Returns the ranks, ascending, that share all coordinates with `rank` but those of the axis.

    A joined axis varies over all axes that it joins.
    """
    free = JOINED_AXES.get(axis, (axis,))
    view = DENSE_AXES if free[0] in DENSE_AXES else SPARSE_AXES
    sizes = tuple(layout.edp if each == "edp" else layout.size(each) for each in view)
    return _members(sizes, tuple(each in free for each in view), rank)


def groups(layout: Layout, rank: int) -> set[Group]:
    """Returns the fewest process groups that a rank needs.

    One for each list of two or more ranks and class of traffic; parameters that go to all ranks
    take the world's group.
    """
    world = tuple(range(layout.world_size))
    wanted = {("tokens", members(layout, rank, axis)) for axis in TOKEN_AXES}
    wanted |= {("parameters", members(layout, rank, axis)) for axis in PARAMETER_AXES}
    wanted |= {("tokens", ranks) for ranks in _node_groups(layout, rank)}
    return {group for group in wanted if len(group[1]) > 1 and group != ("parameters", world)}


def _node_groups(layout: Layout, rank: int) -> list[tuple[int, ...]]:
    """Groups of a dispatcher with two ranks of an ep group on a node: these two, and the ranks that
    have the same place on the other nodes."""
    if layout.dispatch != "nodes" or layout.ep == 2 or layout.ep % 2:
        return []
    ranks = members(layout, rank, "ep")
    place = ranks.index(rank)
    return [
        tuple(other for i, other in enumerate(ranks) if i // 2 == place // 2),
        tuple(other for i, other in enumerate(ranks) if i % 2 == place % 2),
    ]


@cache
def _members(sizes: tuple[int, ...], free: tuple[bool, ...], rank: int) -> tuple[int, ...]:
    ranks = np.arange(prod(sizes)).reshape(sizes)
    own = np.unravel_index(rank, sizes)
    where = tuple(slice(None) if each else at for each, at in zip(free, own, strict=True))
    return tuple(ranks[where].ravel().tolist())
