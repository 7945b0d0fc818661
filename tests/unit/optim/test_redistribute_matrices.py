"""Matrices put together on one rank each, worked on there, and sent back."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.optim.muon import matrix_cut, redistribute_matrices
from titan_moe.runtime.ranks import RankError, run_on_ranks


def counting(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def times_row_and_column(x_NAB):
    rows = torch.arange(x_NAB.shape[1], dtype=x_NAB.dtype)[:, None]
    return x_NAB * (1 + rows) + x_NAB.sum((1, 2), keepdim=True)


def on_every_layout():
    """Returns whether pieces come back as pieces of the changed whole, and the number of matrices
    that each rank worked on."""

    def cut_by_two(shape, dim, fsdp_dim):
        """Cuts by one axis, then by fully_shard: a strided shard if both cut one dim."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        module = nn.Module()
        module.w = nn.Parameter(distribute_tensor(counting(*shape), mesh["tp"], [Shard(dim)]))
        fully_shard(module, mesh=mesh["fsdp"], shard_placement_fn=lambda _: Shard(fsdp_dim))
        return module.w

    def plain(shape, *placements):
        sizes = (4,) if len(placements) == 1 else (2, 2)
        mesh = init_device_mesh("cpu", sizes)  # Without names of axes.
        return distribute_tensor(counting(*shape), mesh, placements)

    cases = {
        "even": plain((8, 6), Shard(0)),
        "uneven": plain((5, 6), Shard(0)),
        "an empty rank": plain((2, 6), Shard(0)),
        "columns": plain((3, 8), Shard(1)),
        "replicas": plain((6, 4), Replicate(), Shard(0)),
        "experts apart": plain((4, 3, 2), Shard(0)),
        "experts and rows": plain((4, 6, 2), Shard(0), Shard(1)),
        "both dims": cut_by_two((6, 8), 1, 0),
        "both dims, uneven": plain((5, 3), Shard(0), Shard(1)),
        "one dim twice, in the mesh's order": plain((8, 6), Shard(0), Shard(0)),
        "one dim twice, unevenly": plain((5, 6), Shard(0), Shard(0)),
        "one dim twice": cut_by_two((8, 6), 0, 0),
        "experts, hidden dim twice": cut_by_two((3, 8, 2), 1, 1),
    }
    found = {}
    for name, parameter in cases.items():
        worked_on = []

        def noted(x_NAB, worked_on=worked_on):
            worked_on.append(len(x_NAB))
            return times_row_and_column(x_NAB)

        assert isinstance(parameter, DTensor)
        # Two axes of two are the whole world.
        cut = matrix_cut(parameter, lambda axes: dist.group.WORLD)
        local = local_part(parameter.detach())
        # Three of the same matrices, so that shares are unequal.
        pieces = (local if local.ndim > 2 else local[None]).repeat(3, 1, 1)
        ours = redistribute_matrices(noted, pieces, cut)
        made = times_row_and_column(counting(*parameter.shape).view(-1, *parameter.shape[-2:]))
        expected = made.view(parameter.shape)[local_slices(parameter)]
        expected = (expected if expected.ndim > 2 else expected[None]).repeat(3, 1, 1)
        total = torch.tensor(sum(worked_on))
        dist.all_reduce(total)
        found[name] = torch.equal(ours, expected), int(total)
    return found


def test_each_rank_gets_its_pieces_of_the_function_of_whole_matrices():
    for found in run_on_ranks(on_every_layout, 4):
        assert {name: same for name, (same, _) in found.items()} == dict.fromkeys(found, True)
        # Three copies of each matrix, each worked on once by the ranks that cut it.
        several = {"replicas": 2, "experts apart": 4, "experts and rows": 4}
        several |= {"experts, hidden dim twice": 3}
        expected = dict.fromkeys(found, 1) | several
        assert {name: total // 3 for name, (_, total) in found.items()} == expected
        assert len(found) == 13


def over_two_axes(number):
    """The joined axes that were asked for, whether the right pieces came back, and what part of the
    elements that this rank holds each all-to-all sent to others."""

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    whole = torch.arange(96.0).view(8, 12)
    parameter = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    pieces = local_part(parameter).repeat(number, 1, 1)
    asked, sent, exchange = [], [], dist.all_to_all_single

    def joined_group(axes):
        asked.append(axes)
        return dist.group.WORLD

    def counted(received, given, received_sizes, sent_sizes, group):
        sent.append((sum(sent_sizes) - sent_sizes[dist.get_rank(group)]) / pieces.numel())
        return exchange(received, given, received_sizes, sent_sizes, group=group)

    dist.all_to_all_single = counted
    cut = matrix_cut(parameter, joined_group)
    made = redistribute_matrices(lambda x_NAB: x_NAB.cumsum(1), pieces, cut)
    expected = whole.cumsum(0)[local_slices(parameter)]
    return asked, all(torch.equal(each, expected) for each in made), sent


def test_matrices_cut_by_two_axes_take_one_exchange_each_way():
    for asked, right, sent in run_on_ranks(over_two_axes, 4, 4):
        assert (asked, right, sent) == ([("fsdp", "tp")], True, [0.75, 0.75])


def test_without_a_joined_group_two_axes_are_refused():
    with pytest.raises(RankError, match="fsdp and tp cut the same matrices"):
        run_on_ranks(no_joined_group, 4)


def no_joined_group():

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    matrix_cut(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)]))
