"""Degrees, coordinates and groups by arithmetic, against a mesh unflattened by torch."""

from contextlib import suppress
from itertools import product

import pytest
import torch

from titan_moe.distributed.parallel_dims import DENSE_AXES, DERIVED_AXES, SPARSE_AXES, ParallelDims

POWERS = (1, 2, 4, 8)


def legal_layouts(world_size: int) -> list[ParallelDims]:
    layouts = []
    for degrees in product(POWERS, repeat=7):
        with suppress(ValueError):
            layouts.append(ParallelDims(world_size, *degrees))
    return layouts


def test_coordinates_and_groups_are_those_of_the_unflattened_world():
    for dims in legal_layouts(8):
        for view in (DENSE_AXES, SPARSE_AXES):
            sizes = [dims.size(axis) for axis in view]
            world = torch.arange(8).view(sizes)
            for rank in range(8):
                place = [int(i) for i in (world == rank).nonzero()[0]]
                assert [dims.coordinate(rank, axis) for axis in view] == place
                for name in (*view, *DERIVED_AXES):
                    joined = DERIVED_AXES.get(name, (name,))
                    if set(joined) <= set(view):
                        zipped = zip(view, place, strict=True)
                        index = tuple(slice(None) if a in joined else at for a, at in zipped)
                        assert dims.group_of(rank, name) == tuple(world[index].flatten().tolist())


def test_dp_shard_minus_one_is_the_rest():
    assert ParallelDims(24, tp=2, pp=3).dp_shard == 4


@pytest.mark.parametrize("degrees", [{"tp": 3}, {"ep": 3}, {"ep": 8, "dp_replicate": 2}, {"pp": 0}])
def test_degrees_that_do_not_multiply_up_are_refused(degrees: dict[str, int]):
    with pytest.raises(ValueError, match=r"\d"):
        ParallelDims(8, **{"dp_shard": -1, **degrees})
