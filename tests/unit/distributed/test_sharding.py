"""Shardings as text, as boxes and as DTensor placements."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from tests.support.shardings import all_shardings
from titan_moe.distributed.boxes import sizes
from titan_moe.distributed.parallel_dims import coordinates
from titan_moe.distributed.sharding import Sharding

AXES = {"x": 2, "y": 3, "z": 2}


def test_text_comes_back_from_the_value_that_it_makes() -> None:
    for sharding in all_shardings("xyz", 2):
        assert Sharding.parse(str(sharding)) == sharding
    assert str(Sharding.parse("P[tp]S(0)[ep,edp]S(1)[etp]")) == "P[tp]S(0)[ep,edp]S(1)[etp]"
    assert Sharding.parse("S(1)[b]S(0)[a]") == Sharding((("a",), ("b",)))
    assert Sharding.parse("R") == Sharding() == Sharding(((), ()))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no sharding"),
        ("S(0)", "no sharding"),
        ("S[x]", "no sharding"),
        ("S(0)[x] S(1)[y]", "no sharding"),
        ("RS(0)[x]", "no sharding"),
        ("S(0)[x]S(0)[y]", "two terms of one kind"),
        ("S(0)[x]S(1)[x]", "names x twice"),
        ("P[x]S(1)[x]", "names x twice"),
        ("S(2)[x]", r"cuts dim 2 of a tensor of 2 dims, \[4, 4\]"),
        ("P[w]S(0)[x]", "names w; the mesh has the axes x, y, z"),
    ],
)
def test_a_text_that_is_no_sharding_or_does_not_fit_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sharding.parse(text).box(0, (4, 4), AXES)


@pytest.mark.parametrize("shape", [(12, 12), (7, 5), (1, 4)])
def test_boxes_are_those_of_chunks_of_chunks(shape: tuple[int, int]) -> None:
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    for sharding in all_shardings("xyz", 2):
        for rank in range(12):
            part, place = whole, coordinates(rank, AXES)
            for dim, cut in enumerate(sharding.cuts):
                for axis in cut:
                    chunks = list(part.chunk(AXES[axis], dim)) if part.shape[dim] else []
                    empty = part.narrow(dim, 0, 0)
                    part = (chunks + [empty] * AXES[axis])[place[axis]]
            box = sharding.box(rank, shape, AXES)
            assert torch.equal(whole[box], part), (str(sharding), rank)
            largest = sizes(sharding.box(0, shape, AXES))  # As searches of plans take it to be.
            assert all(a <= b for a, b in zip(sizes(box), largest, strict=True))


def test_placements_hold_the_order_and_torch_reads_them_alike() -> None:
    mesh_shape = tuple(AXES.values())
    for sharding in all_shardings("xyz", 2):
        placements = sharding.placements(AXES)
        assert Sharding.of(placements, AXES) == sharding
        if sharding.partial:
            continue
        for rank in range(12):
            shape, offset = _compute_local_shape_and_global_offset(
                (24, 12), mesh_shape, list(coordinates(rank, AXES).values())[::-1], placements
            )
            box = sharding.box(rank, (24, 12), AXES)
            assert [each.start for each in box] == list(offset), (str(sharding), rank)
            assert sizes(box) == tuple(shape)


@pytest.mark.parametrize("placement", [Partial("avg"), Partial("max"), _NormPartial(2)])
def test_a_partial_that_is_no_sum_is_refused(placement: Partial) -> None:
    placements = (placement, Replicate(), Shard(0))
    with pytest.raises(ValueError, match=r"Partial.* on axis x is no plain sum"):
        Sharding.of(placements, AXES)
    assert str(Sharding.of((Partial(), Replicate(), Shard(0)), AXES)) == "P[x]S(0)[z]"
