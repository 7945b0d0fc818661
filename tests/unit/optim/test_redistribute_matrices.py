"""Matrices put together on one rank each, worked on there, and sent back."""

import pytest
import torch
from torch import nn

from titan_moe.optim.muon import chunk_lengths
from titan_moe.testing.ranks import run_on_ranks


@pytest.mark.parametrize("length, chunks", [(6, 3), (7, 3), (2, 4), (5, 4), (0, 2), (9, 1)])
def test_lengths_are_those_of_torch_chunk(length, chunks):
    parts = [len(part) for part in torch.arange(length).chunk(chunks)]
    if length == 0:
        parts = []
    assert list(chunk_lengths(length, chunks)) == parts + [0] * (chunks - len(parts))


def on_every_layout(world_size):
    """Whether pieces come back as pieces of what was made of the whole, and how many matrices each
    rank worked on."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from titan_moe.distributed.dtensor import local_part, local_slices
    from titan_moe.optim.muon import matrix_cuts, redistribute_matrices

    def cut_by_two(shape, dim, fsdp_dim):
        """By one axis first, then by fully_shard: a strided shard where both cut one dim."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        module = nn.Module()
        module.w = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(dim)]))
        fully_shard(module, mesh=mesh["fsdp"], shard_placement_fn=lambda _: Shard(fsdp_dim))
        return module.w

    def plain(shape, *placements):
        sizes = (4,) if len(placements) == 1 else (2, 2)
        mesh = init_device_mesh("cpu", sizes)
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        return distribute_tensor(whole, mesh, placements)

    cases = {
        "even": plain((8, 6), Shard(0)),
        "uneven": plain((5, 6), Shard(0)),
        "an empty rank": plain((2, 6), Shard(0)),
        "columns": plain((3, 8), Shard(1)),
        "replicas": plain((6, 4), Replicate(), Shard(0)),
        "experts apart": plain((4, 3, 2), Shard(0)),
        "experts and rows": plain((4, 6, 2), Shard(0), Shard(1)),
        "both dims": cut_by_two((6, 8), 1, 0),
        "one dim twice": cut_by_two((8, 6), 0, 0),
        "experts, hidden dim twice": cut_by_two((3, 8, 2), 1, 1),
    }
    found = {}
    for name, parameter in cases.items():
        worked_on = []

        def times_row_and_column(x_NAB, worked_on=worked_on):
            worked_on.append(len(x_NAB))
            rows = torch.arange(x_NAB.shape[1], dtype=x_NAB.dtype)[:, None]
            return x_NAB * (1 + rows) + x_NAB.sum((1, 2), keepdim=True)

        assert isinstance(parameter, DTensor)
        cuts = matrix_cuts(parameter)
        local = local_part(parameter.detach())
        # Three of the same matrices, so that shares are unequal.
        pieces = (local if local.ndim > 2 else local[None]).repeat(3, 1, 1)
        ours = redistribute_matrices(times_row_and_column, pieces, cuts)
        whole = torch.arange(parameter.shape.numel(), dtype=torch.float64).view(parameter.shape)
        whole = whole.view(-1, *whole.shape[-2:])
        rows = torch.arange(whole.shape[1], dtype=whole.dtype)[:, None]
        made = whole * (1 + rows) + whole.sum((1, 2), keepdim=True)
        expected = made.view(parameter.shape)[local_slices(parameter)]
        expected = (expected if expected.ndim > 2 else expected[None]).repeat(3, 1, 1)
        total = torch.tensor(sum(worked_on))
        dist.all_reduce(total)
        found[name] = torch.equal(ours, expected), int(total)
    return found


def test_pieces_of_what_is_made_of_the_whole_come_back():
    for found in run_on_ranks(on_every_layout, 4, 4):
        assert {name: same for name, (same, _) in found.items()} == dict.fromkeys(found, True)
        # Three copies of each matrix, each worked on once by the ranks that cut it.
        assert {name: total // 3 for name, (_, total) in found.items()} == {
            "even": 1,
            "uneven": 1,
            "an empty rank": 1,
            "columns": 1,
            "replicas": 2,
            "experts apart": 4,
            "experts and rows": 4,
            "both dims": 1,
            "one dim twice": 1,
            "experts, hidden dim twice": 3,
        }


def one_matrix_cut_twice(_: int) -> bool:
    """Two of the four ranks get none of it where the first cut is undone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from titan_moe.distributed.dtensor import local_part
    from titan_moe.optim.muon import matrix_cuts, redistribute_matrices

    whole = torch.arange(48.0).view(6, 8)
    parameter = distribute_tensor(whole, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
    pieces_1AB = local_part(parameter)[None]
    doubled = redistribute_matrices(lambda x_NAB: 2 * x_NAB, pieces_1AB, matrix_cuts(parameter))
    return torch.equal(doubled, 2 * pieces_1AB)


def test_there_may_be_fewer_matrices_than_ranks_that_cut_them_twice():
    assert run_on_ranks(one_matrix_cut_twice, 4, 4) == [True] * 4
