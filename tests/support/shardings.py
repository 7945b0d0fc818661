"""All shardings of a small tensor, and tensors laid out at random over ranks.

Expected transfers are found element by element.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from titan_moe.distributed.parallel_dims import Axes
from titan_moe.distributed.sharding import Sharding
from titan_moe.distributed.transfer_plan import Held

DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.float32, torch.uint8)

Ranks = list[dict[str, Held]]
"""The tensors of each rank, by name."""


def all_shardings(axes: Sequence[str], num_dims: int) -> Iterator[Sharding]:
    """Each axis copies or cuts one of the dims; those that cut the same dim in any order."""
    for roles in product([None, *range(num_dims)], repeat=len(axes)):
        cutting = [
            [a for a, role in zip(axes, roles, strict=True) if role == d] for d in range(num_dims)
        ]
        for cuts in product(*(permutations(cut) for cut in cutting)):
            yield Sharding(cuts)


def placements_of(sharding: Sharding, axes: Axes) -> tuple[Placement, ...]:
    """Returns the placements of a DTensor on a mesh with these axes: an axis that cuts before one
    to its left in the mesh is a `_StridedShard`."""
    names = list(axes)
    placements: list[Placement] = [Replicate() for _ in names]
    for dim, cut in enumerate(sharding.cuts):
        for number, axis in enumerate(cut):
            place = names.index(axis)
            split_factor = prod(axes[a] for a in cut[:number] if names.index(a) > place)
            strided = _StridedShard(dim, split_factor=split_factor)
            placements[place] = strided if split_factor > 1 else Shard(dim)
    return tuple(placements)


def draw(chance: random.Random, world_size: int, num_tensors: int) -> tuple[Ranks, Ranks]:
    """Tensors of any shape and type, before and after in layouts that have nothing in common; some
    on a part of the ranks only."""
    held: Ranks = [{} for _ in range(world_size)]
    wanted: Ranks = [{} for _ in range(world_size)]
    for number in range(num_tensors):
        shape = tuple(chance.randint(1, 9) for _ in range(chance.randint(0, 3)))
        dtype = chance.choice(DTYPES)
        for ranks in (held, wanted):
            lay_out(chance, ranks, f"tensor.{number}", shape, dtype)
    return held, wanted


def lay_out(
    chance: random.Random, ranks: Ranks, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """One tensor over some of the ranks, by a sharding over axes that they make up."""
    members = sorted(chance.sample(range(len(ranks)), chance.randint(1, len(ranks))))
    sizes = chance.choice([(len(members),), *_factors(len(members))])
    axes = {f"axis{place}": size for place, size in enumerate(sizes)}
    cuts: list[tuple[str, ...]] = [() for _ in shape]
    for axis in chance.sample(list(axes), len(axes)):
        if shape and chance.random() < 0.8:
            dim = chance.randrange(len(shape))
            cuts[dim] = (*cuts[dim], axis)
    sharding = Sharding(tuple(cuts))
    for place, rank in enumerate(members):
        ranks[rank][name] = Held(shape, dtype, sharding.box(place, shape, axes))


def _factors(number: int) -> list[tuple[int, int]]:
    return [(n, number // n) for n in range(2, number) if number % n == 0]


def whole(name: str, part: Held) -> Tensor:
    """The tensor that parts of a name are of: neighbours differ, and so do tensors."""
    values = torch.arange(prod(part.shape)) + 7 * int(name.rpartition(".")[2])
    return (values % 251).to(part.dtype).view(part.shape)


def mask(part: Held) -> np.ndarray:
    """Returns True for the elements of the whole tensor that a part has."""
    has = np.zeros(part.shape, bool)
    has[part.box] = True
    return has


def missing_bytes(held: Sequence[Mapping[str, Held]], wanted: Sequence[Mapping[str, Held]]) -> int:
    """Returns the bytes that ranks want and do not hold, counted by element: the lower bound."""
    total = 0
    for before, after in zip(held, wanted, strict=True):
        for name, part in after.items():
            has = mask(before[name]) if name in before else np.zeros(part.shape, bool)
            total += int((mask(part) & ~has).sum()) * part.dtype.itemsize
    return total
