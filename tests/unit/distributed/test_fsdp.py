"""The tensor dim that FSDP cuts."""

import pytest
import torch

from titan_moe.distributed.fsdp import shard_dim


@pytest.mark.parametrize(
    "shape, num_shards, expected",
    [
        ((8, 64, 32), 4, 0),  # divides
        ((8, 64, 32), 8, 0),
        ((2, 64, 32), 4, 1),  # dim 0 would leave ranks empty
        ((2, 63, 32), 4, 2),
        ((2, 63, 31), 4, 0),  # nothing divides: empty shards are legal
        ((10, 64), 4, 0),  # uneven (3, 3, 3, 1), none empty
        ((9, 64), 8, 1),  # chunks of 2 leave three ranks empty
        ((7,), 8, 0),
    ],
)
def test_no_rank_is_empty_where_another_dim_divides(shape, num_shards, expected):
    dim = shard_dim(torch.Size(shape), num_shards)
    assert dim == expected
    chunks = torch.empty(shape).chunk(num_shards, dim)
    empty = len(chunks) < num_shards
    assert not empty or not any(size % num_shards == 0 for size in shape)
