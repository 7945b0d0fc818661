"""Plans which rank sends which part of which tensor to which other rank; needs no process group.

Each rank gets exactly what it wants and does not hold, so that the bytes sent are the fewest
possible. Where several ranks hold a part, they share its sending.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from titan_moe.distributed.boxes import Box

_Bounds = tuple[tuple[int, int], ...]


class Held(NamedTuple):
    """A rank's part of a tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    box: Box

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Parts = list[tuple[int, Held]]
"""Parts of one tensor with the ranks that have them."""


class Pieces(NamedTuple):
    """Holds the pieces of one tensor that move: arrays with an entry for each piece.

    A piece whose source is its target is a copy on that rank.
    """

    name: str
    itemsize: int
    sources: np.ndarray
    targets: np.ndarray
    boxes: np.ndarray
    """[N, D, 2]: where each piece begins and ends along each dim of the whole tensor."""

    @property
    def bytes_sent(self) -> np.ndarray:
        """Returns the bytes of each piece that moves to another rank, and 0 for a copy."""
        lengths = self.boxes[..., 1] - self.boxes[..., 0]
        is_sent = self.sources != self.targets
        return lengths.prod(axis=1, dtype=np.int64) * self.itemsize * is_sent

    def of(self, rank: int) -> Iterator[tuple[int, int, Box]]:
        """Yields source, target and box of the pieces that a rank sends, receives or copies."""
        own = np.flatnonzero((self.sources == rank) | (self.targets == rank))
        for source, target, box in zip(
            self.sources[own].tolist(),
            self.targets[own].tolist(),
            self.boxes[own].tolist(),
            strict=True,
        ):
            yield source, target, tuple(slice(first, last) for first, last in box)


Bucket = list[Pieces]
"""Pieces of several tensors that move in one all-to-all, or only in local copies."""


def plan_transfer(
    held: Sequence[Mapping[str, Held]],
    wanted: Sequence[Mapping[str, Held]],
    *,
    max_bytes: int,
) -> list[Bucket]:
    """Plans who sends what to whom, in buckets in their order. Ranks that give the same arguments
    get the same plan.

    Args:
        held: each rank's parts by name, before the transfer. Two parts of a tensor are the same box
            or have nothing in common.
        wanted: each rank's parts afterwards; names that only `held` has are ignored.
        max_bytes: most bytes that a rank sends, or receives, in one all-to-all; a single tensor's
            parts may be more.

    Raises ValueError with one line if ranks give a tensor different shapes or dtypes, if parts that
    they hold overlap, or if no rank holds what one wants.
    """
    holders, wanters = _by_name(held), _by_name(wanted)
    load = [0] * len(held)
    moves = [
        _pieces_of(name, holders.get(name, []), parts, load)
        for name, parts in sorted(wanters.items())
    ]
    return list(_buckets(moves, len(held), max_bytes))


def _by_name(ranks: Sequence[Mapping[str, Held]]) -> dict[str, Parts]:
    """Returns the parts of each tensor, in the order of ranks."""
    found = defaultdict(list)
    for rank, tensors in enumerate(ranks):
        for name, part in tensors.items():
            found[name].append((rank, part))
    return found


def _pieces_of(name: str, holders: Parts, wanters: Parts, load: list[int]) -> Pieces:
    """Returns the pieces of one tensor; adds their bytes to `load`, which each rank sends."""
    wanter, like = wanters[0]
    for rank, part in holders + wanters:
        if part.shape != like.shape or part.dtype != like.dtype:
            raise ValueError(f"{name} is {part} on rank {rank} and {like} on rank {wanter}")
    itemsize = like.dtype.itemsize
    holding, wanting = by_box(holders), by_box(wanters)
    places, bounds, sizes = overlaps(list(holding), list(wanting), len(like.shape))
    # Parts must not overlap: an element held twice would hide one that nobody holds.
    if len(overlaps(list(holding), list(holding), len(like.shape))[0]) > len(holding):
        raise ValueError(f"{name}: ranks hold parts that overlap")
    elements = (prod(last - first for first, last in bounds) for bounds in wanting)
    if missing := sum(elements) - int(sizes.sum()):
        raise ValueError(f"{name}: no rank holds {missing} of the elements that are wanted of it")
    senders, receivers = list(holding.values()), list(wanting.values())
    sources: list[int] = []
    targets: list[int] = []
    repeats = []
    numbers = (sizes[tuple(places.T)] * itemsize).tolist()
    for (held, wanted), number in zip(places.tolist(), numbers, strict=True):
        of = senders[held]
        repeats.append(len(receivers[wanted]))
        for target in receivers[wanted]:
            source = of[0]
            if len(of) > 1:
                source = target if target in of else min(of, key=load.__getitem__)
            if source != target:
                load[source] += number
            sources.append(source)
            targets.append(target)
    return Pieces(
        name,
        itemsize,
        np.array(sources, np.int32),
        np.array(targets, np.int32),
        bounds.repeat(repeats, axis=0),
    )


def by_box(parts: Parts) -> dict[_Bounds, list[int]]:
    """Returns the ranks that hold each box of a tensor; empty boxes are left out."""
    found: dict[_Bounds, list[int]] = {}
    for rank, part in parts:
        bounds = tuple((each.start, each.stop) for each in part.box)
        if all(first < last for first, last in bounds):
            found.setdefault(bounds, []).append(rank)
    return found


def overlaps(
    held: list[_Bounds], wanted: list[_Bounds], num_dims: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the pairs of boxes held [H] and wanted [W] that meet, [N, 2]; the bounds of what they
    share, [N, D, 2]; and the number of elements that each two share, [H, W]."""
    before = np.array(held, np.int64).reshape(len(held), 1, num_dims, 2)
    after = np.array(wanted, np.int64).reshape(1, len(wanted), num_dims, 2)
    first = np.maximum(before[..., 0], after[..., 0])
    last = np.minimum(before[..., 1], after[..., 1])
    sizes = (last - first).clip(min=0).prod(axis=-1)
    places = np.argwhere(sizes)
    meet = tuple(places.T)
    return places, np.stack([first[meet], last[meet]], axis=-1), sizes


def _buckets(moves: Sequence[Pieces], world_size: int, max_bytes: int) -> Iterator[Bucket]:
    """Consecutive tensors together, as long as no rank sends or receives more than `max_bytes`."""
    bucket: Bucket = []
    filled = np.zeros((2, world_size), np.int64)  # Bytes that each rank sends, and receives.
    for pieces in moves:
        ends = pieces.sources, pieces.targets
        added = np.array([np.bincount(each, pieces.bytes_sent, world_size) for each in ends], int)
        if bucket and (filled + added).max() > max_bytes:
            yield bucket
            bucket, filled = [], np.zeros_like(filled)
        bucket.append(pieces)
        filled += added
    if bucket:
        yield bucket
