"""All shardings of a small tensor over a small mesh."""

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from titan_moe.distributed.sharding import Sharding


def all_shardings(axes: Sequence[str], num_dims: int) -> Iterator[Sharding]:
    """Each axis copies, sums, or cuts one of the dims; those that cut the same dim in any order."""
    for roles in product(["copies", "sums", *range(num_dims)], repeat=len(axes)):
        cutting = [
            [a for a, role in zip(axes, roles, strict=True) if role == d] for d in range(num_dims)
        ]
        partial = frozenset(a for a, role in zip(axes, roles, strict=True) if role == "sums")
        for cuts in product(*(permutations(cut) for cut in cutting)):
            yield Sharding(cuts, partial)
