"""Plans of transfers, against a count of every element."""

import random

import numpy as np
import pytest
import torch

from tests.support.shardings import Ranks, draw, mask, missing_bytes
from titan_moe.distributed.sharding import Sharding
from titan_moe.distributed.transfer_plan import Bucket, Held, plan_transfer


def check(plan: list[Bucket], held: Ranks, wanted: Ranks, max_bytes: int) -> np.ndarray:
    """Every element that is wanted comes once, from one who holds it; no bucket of several tensors
    is too large. Returns the bytes that each rank sends."""
    sent = np.zeros(len(held), int)
    came = {
        (rank, name): np.zeros(part.shape, int)
        for rank, of in enumerate(wanted)
        for name, part in of.items()
    }
    for bucket in plan:
        ends = np.zeros((2, len(held)), int)
        for pieces in bucket:
            ranks = zip(pieces.sources, pieces.targets, strict=True)
            pairs = zip(ranks, pieces.boxes, pieces.bytes_sent, strict=True)
            for (source, target), bounds, number in pairs:
                box = tuple(slice(first, last) for first, last in bounds)
                assert mask(held[source][pieces.name])[box].all(), "sent by one who has it not"
                came[target, pieces.name][box] += 1
                size = mask(wanted[target][pieces.name])[box].size * pieces.itemsize
                assert number == (size if source != target else 0)
                ends[0, source] += number
                ends[1, target] += number
        sent += ends[0]
        assert ends.max() <= max_bytes or len(bucket) == 1
    for (rank, name), times in came.items():
        np.testing.assert_array_equal(times, mask(wanted[rank][name]), f"{name} on rank {rank}")
    return sent


@pytest.mark.parametrize("max_bytes", [1, 100, 2**28])
@pytest.mark.parametrize("world_size", [1, 2, 4, 7, 12])
def test_missing_elements_are_sent_once_and_no_others(
    world_size: int, max_bytes: int
) -> np.ndarray:
    held, wanted = draw(random.Random(world_size), world_size, 40)
    plan = plan_transfer(held, wanted, max_bytes=max_bytes)
    assert check(plan, held, wanted, max_bytes).sum() == missing_bytes(held, wanted)


def ranks_of(sharding: Sharding, axes: dict[str, int], names: int, shape: tuple[int, ...]) -> Ranks:
    world_size = int(np.prod(list(axes.values())))
    return [
        {
            f"tensor.{number}": Held(shape, torch.float32, sharding.box(rank, shape, axes))
            for number in range(names)
        }
        for rank in range(world_size)
    ]


def test_replicas_share_the_sending() -> None:
    axes = {"replicate": 4, "shard": 2}
    held = ranks_of(Sharding((("shard",),)), axes, 25, (6, 8))
    wanted = ranks_of(Sharding(), axes, 25, (6, 8))
    sent = check(plan_transfer(held, wanted, max_bytes=2**20), held, wanted, 2**20)
    half_of_a_tensor = 3 * 8 * 4
    assert sent.sum() == 8 * 25 * half_of_a_tensor
    assert sent.max() - sent.min() <= half_of_a_tensor


def _row(first: int, last: int, *, size: int = 4, dtype: torch.dtype = torch.float32) -> Held:
    return Held((size,), dtype, (slice(first, last),))


@pytest.mark.parametrize(
    "held, wanted, says",
    [
        ([_row(0, 2), None], _row(1, 4), "w: no rank holds 2 of the elements"),
        ([_row(0, 0), None], _row(1, 4), "w: no rank holds 3 of the elements"),
        # Four elements in all, but none of them is the last one.
        ([_row(0, 3), _row(1, 2)], _row(0, 4), "w: ranks hold parts that overlap"),
        ([_row(0, 4), _row(0, 4)], _row(0, 5, size=5), r"w is float32\[4\] on rank 0 and"),
        ([_row(0, 4), _row(0, 4)], _row(0, 4, dtype=torch.float64), "w is float32.* and float64"),
    ],
)
def test_tensors_that_lack_elements_or_that_ranks_see_differently_are_an_error(
    held: list[Held | None], wanted: Held, says: str
) -> None:
    ranks = [{"w": part} if part else {} for part in held]
    with pytest.raises(ValueError, match=says):
        plan_transfer(ranks, [{}, {"w": wanted}], max_bytes=1)
