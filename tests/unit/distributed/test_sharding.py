"""Shardings as text, as boxes and as DTensor placements."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from tests.support.shardings import all_shardings, placements_of
from titan_moe.distributed.boxes import sizes
from titan_moe.distributed.parallel_dims import coordinates
from titan_moe.distributed.sharding import Sharding

AXES = {"x": 2, "y": 3, "z": 2}


def test_a_sharding_is_printed_in_the_notation() -> None:
    assert str(Sharding((("ep", "edp"), ("etp",)))) == "S(0)[ep,edp]S(1)[etp]"
    assert str(Sharding(((), ("tp",)))) == "S(1)[tp]"
    assert str(Sharding()) == str(Sharding(((), ()))) == "R"


@pytest.mark.parametrize("shape", [(12, 12), (7, 5), (1, 4)])
def test_boxes_are_those_of_chunks_of_chunks(shape: tuple[int, int]) -> None:
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    for sharding in all_shardings("xyz", 2):
        for rank in range(12):
            part, place = whole, coordinates(rank, AXES)
            for dim, cut in enumerate(sharding.cuts):
                for axis in cut:
                    chunks = list(part.chunk(AXES[axis], dim)) if part.shape[dim] else []
                    part = (chunks + [part.narrow(dim, 0, 0)] * AXES[axis])[place[axis]]
            box = sharding.box(rank, shape, AXES)
            assert torch.equal(whole[box], part), (str(sharding), rank)


def test_placements_hold_the_order_and_torch_reads_them_alike() -> None:
    mesh_shape = tuple(AXES.values())
    for sharding in all_shardings("xyz", 2):
        placements = placements_of(sharding, AXES)
        assert str(Sharding.of(placements, AXES)) == str(sharding)
        for rank in range(12):
            shape, offset = _compute_local_shape_and_global_offset(
                (24, 12), mesh_shape, list(coordinates(rank, AXES).values())[::-1], placements
            )
            box = sharding.box(rank, (24, 12), AXES)
            assert [each.start for each in box] == list(offset), (str(sharding), rank)
            assert sizes(box) == tuple(shape)


@pytest.mark.parametrize("placement", [Partial(), Partial("avg"), _NormPartial(2)])
def test_a_partial_is_refused(placement: Partial) -> None:
    with pytest.raises(ValueError, match=r"Partial.* on axis x: a tensor whose sum is not taken"):
        Sharding.of((placement, Replicate(), Shard(0)), AXES)
