"""What must hold of the shards and groups of any layout, however many ranks: by arithmetic alone.

No torch and no process, so that all ranks of thousands of layouts are checked in seconds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod

import numpy as np

from titan_moe.verify.layouts.layouts import DENSE_AXES, Layout
from titan_moe.verify.layouts.shards import HIDDEN_DIM, SPARSE_AXES, Box, Shards

JOINED_AXES: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("dp_shard", "cp"),
    "sequence": ("cp", "tp"),
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}
TOKEN_AXES = ("pp", "cp", "tp", "sequence", "ep", "etp")
PARAMETER_AXES = ("dp_replicate", "fsdp", "edp")
MOST_GROUPS = len(TOKEN_AXES) + len(PARAMETER_AXES) + 2
"""Of a rank, in a world of any size: one for each axis that something is exchanged over, and two
for rows between and within nodes."""

Group = tuple[str, tuple[int, ...]]
"""A class of traffic, "tokens" or "parameters", and the ranks, ascending."""


def members(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    """The ranks that differ from `rank` at most on this axis of the view, or on those that it
    joins."""
    parts = JOINED_AXES.get(axis, (axis,))
    view = DENSE_AXES if parts[0] in DENSE_AXES else SPARSE_AXES
    sizes = tuple(_size(layout, each) for each in view)
    return _members(sizes, tuple(each in parts for each in view), rank)


def groups(layout: Layout, rank: int) -> set[Group]:
    """The fewest process groups that a rank needs.

    One for each list of two or more ranks and class of traffic; parameters that go to all ranks
    take the world's own.
    """
    world = tuple(range(layout.world_size))
    wanted = {("tokens", members(layout, rank, axis)) for axis in TOKEN_AXES}
    wanted |= {("parameters", members(layout, rank, axis)) for axis in PARAMETER_AXES}
    wanted |= {("tokens", ranks) for ranks in _of_nodes(layout, rank)}
    return {
        (traffic, ranks)
        for traffic, ranks in wanted
        if len(ranks) > 1 and (traffic, ranks) != ("parameters", world)
    }


def _of_nodes(layout: Layout, rank: int) -> list[tuple[int, ...]]:
    """Where two ranks of an ep group share a node: these two, and those with this one's place on
    the other nodes."""
    if layout.dispatch != "nodes" or layout.ep == 2 or layout.ep % 2:
        return []
    ranks = members(layout, rank, "ep")
    place = ranks.index(rank)
    return [
        tuple(other for i, other in enumerate(ranks) if i // 2 == place // 2),
        tuple(other for i, other in enumerate(ranks) if i % 2 == place % 2),
    ]


def group_problems(layout: Layout) -> list[str]:
    """Ranks that have other groups than their members have, or more than there may be."""
    of_rank = [groups(layout, rank) for rank in range(layout.world_size)]
    found = [
        f"rank {rank} has {len(own)} process groups, rank 0 has {len(of_rank[0])}: at most "
        f"{MOST_GROUPS}, the same number everywhere"
        for rank, own in enumerate(of_rank)
        if len(own) != len(of_rank[0]) or len(own) > MOST_GROUPS
    ]
    known = Counter(group for own in of_rank for group in own)
    found += [
        f"{count} of the {len(ranks)} ranks {ranks} have their group for {traffic}"
        for (traffic, ranks), count in known.items()
        if count != len(ranks)
    ]
    return found


class Tiling:
    """Checks the parts of parameters; what recurs from layout to layout is checked once."""

    def __init__(self) -> None:
        self._known: dict[tuple, str] = {}

    def problems(self, shards: Shards, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """One line for each parameter, of these shapes, that is not held as it should be.

        Each element is on one rank or on as many copies as expected, no more, and no rank's part is
        empty that need not be.
        """
        owners, found = _owners(shards)
        for name, shape in shapes.items():
            stages = _stages_with(shards, name)
            if len(stages) != 1:
                found.append(f"{name} is on the stages {stages}, not on one")
                continue
            problem = self._problem(shards, name, tuple(shape), owners[stages[0]])
            if problem:
                found.append(f"{name} {list(shape)}: {problem}")
        return found

    def _problem(
        self, shards: Shards, name: str, shape: tuple[int, ...], holders: tuple[int, ...]
    ) -> str:
        layout, routed = shards.layout, ".experts." in name
        if routed:
            cut = {0: layout.ep}
            if (hidden := HIDDEN_DIM.get(name.rsplit(".", 1)[1])) is not None:
                cut[hidden] = layout.etp
            pieces, copies = layout.edp, layout.dp_replicate
        else:
            dim = shards.tensor_dim(name)
            cut = {} if dim is None else {dim: layout.tp}
            pieces = layout.dp_shard * layout.cp
            copies = layout.dp_replicate * (layout.tp if dim is None else 1)
        view = SPARSE_AXES if routed else DENSE_AXES
        sizes = tuple(_size(layout, axis) for axis in view)
        key = (sizes, routed, tuple(cut.items()), shape, holders)
        if key not in self._known:
            boxes = [shards.box(rank, name, shape) for rank in holders]
            part = [size // cut.get(dim, 1) for dim, size in enumerate(shape)]
            self._known[key] = tiling_problem(
                shape, boxes, copies=copies, may_be_empty=has_empty_shards(part, pieces)
            )
        return self._known[key]


def tiling_problem(
    shape: Sequence[int], boxes: Sequence[Box], *, copies: int, may_be_empty: bool
) -> str:
    """What keeps these boxes from covering a tensor `copies` times, evenly; nothing if they do."""
    ends = [tuple((part.start, part.stop) for part in box) for box in boxes]
    held = Counter(box for box in ends if all(first < end for first, end in box))
    empty = len(boxes) - held.total()
    if empty and not may_be_empty:
        return f"{empty} ranks hold nothing"
    if set(held.values()) != {copies}:
        return f"parts are held {sorted(set(held.values()))} times, not {copies}"
    bounds = np.array(list(held), dtype=np.int64)  # [parts, dims, (first, end)]
    if (bounds[..., 0] < 0).any() or (bounds[..., 1] > np.array(shape)).any():
        return "parts reach beyond it"
    first, end = bounds[..., 0], bounds[..., 1]
    common = np.minimum(end[:, None], end) - np.maximum(first[:, None], first)
    overlaps = (common > 0).all(-1).sum() - len(bounds)
    if overlaps:
        return f"{overlaps // 2} pairs of parts overlap"
    covered = int((end - first).prod(-1).sum())
    return "" if covered == prod(shape) else f"parts hold {covered} of {prod(shape)} elements"


def has_empty_shards(part: Sequence[int], pieces: int) -> bool:
    """Whether data parallelism leaves some of this many pieces of a rank's part empty.

    It cuts dim 0 into chunks of one size, of which only the last may be smaller, or any other dim
    into equal ones.
    """
    rows_fill_all = -(-part[0] // pieces) * (pieces - 1) < part[0]
    return not rows_fill_all and all(size % pieces for size in part)


def _size(layout: Layout, axis: str) -> int:
    return layout.edp if axis == "edp" else layout.size(axis)


@cache
def _members(sizes: tuple[int, ...], free: tuple[bool, ...], rank: int) -> tuple[int, ...]:
    ranks = np.arange(prod(sizes)).reshape(sizes)
    own = np.unravel_index(rank, sizes)
    where = tuple(slice(None) if each else at for each, at in zip(free, own, strict=True))
    return tuple(ranks[where].ravel().tolist())


def _owners(shards: Shards) -> tuple[list[tuple[int, ...]], list[str]]:
    """The ranks of each pipeline stage, and any stage on too many or too few."""
    layout = shards.layout
    world = range(layout.world_size)
    if not shards.stages:
        return [tuple(world)], []
    stages_of = [shards.stages_of(rank) for rank in world]
    owners = [
        tuple(rank for rank in world if stage in stages_of[rank])
        for stage in range(len(shards.stages))
    ]
    share = layout.world_size // layout.pp
    found = [
        f"stage {stage} is on {len(ranks)} ranks, not on {share}"
        for stage, ranks in enumerate(owners)
        if len(ranks) != share
    ]
    return owners, found


def _stages_with(shards: Shards, name: str) -> list[int]:
    if not shards.stages:
        return [0]
    return [stage for stage in range(len(shards.stages)) if shards.on_stage(stage, name)]
