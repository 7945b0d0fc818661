"""Tensors cut by several axes in any order: where parts lie, and checkpoints of every order."""

from itertools import permutations, product
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _dtensor_spec as dtensor_spec
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.support.shardings import all_shardings, placements_of
from tests.support.tiers import tiered
from titan_moe.checkpoint.checksums import checksums
from titan_moe.checkpoint.tensors import held_chunks, read_tensors, write_chunks
from titan_moe.distributed.dtensor import check_divides, local_part, mesh_axes, sharding_of
from titan_moe.distributed.parallel_dims import coordinates
from titan_moe.distributed.sharding import Sharding
from titan_moe.runtime.ranks import run_on_ranks

Sizes = tuple[int, ...]


def strided(whole: Tensor, sharding: Sharding, mesh: DeviceMesh) -> DTensor:
    """Returns a tensor whose placements hold the order of its cuts."""
    local, meta = _part_of(whole, sharding, mesh)
    spec = DTensorSpec(mesh, placements_of(sharding, mesh_axes(mesh)), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def explicit(whole: Tensor, sharding: Sharding, mesh: DeviceMesh) -> DTensor:
    """Returns a tensor with plain placements, and the order of its cuts beside them."""
    local, meta = _part_of(whole, sharding, mesh)
    names = list(mesh_axes(mesh))
    placements: list[Placement] = [Replicate() for _ in names]
    order = []
    for dim, cut in enumerate(sharding.cuts):
        for axis in cut:
            placements[names.index(axis)] = Shard(dim)
        if cut:
            axes = tuple(map(names.index, cut))
            order.append(dtensor_spec.ShardOrderEntry(tensor_dim=dim, mesh_dims=axes))
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta, shard_order=tuple(order))
    return DTensor(local, spec, requires_grad=False)


def _part_of(whole: Tensor, sharding: Sharding, mesh: DeviceMesh) -> tuple[Tensor, TensorMeta]:
    box = sharding.box(dist.get_rank(), whole.shape, mesh_axes(mesh))
    return whole[box].contiguous(), TensorMeta(whole.shape, whole.stride(), whole.dtype)


def _each_way(whole: Tensor, mesh: DeviceMesh) -> dict[str, DTensor]:
    """The tensor under every sharding, its order said in every way that torch has for it."""
    made = {}
    for sharding in all_shardings(list(mesh_axes(mesh)), whole.ndim):
        within = strided(whole, sharding, mesh)
        if any(isinstance(each, _StridedShard) for each in within.placements):
            made[f"{sharding} beside"] = explicit(whole, sharding, mesh)
        try:
            sharding_of(within)
        except ValueError:  # A strided shard of a dim that does not divide.
            continue
        made[str(sharding)] = within
    return made


def _save_and_load(
    sizes: Sizes, shape: Sizes, distances: list[int], folder: Path
) -> tuple[int, list[str]]:
    """Returns the number of saved tensors, and the loads with other bits. A tensor is loaded under
    the shardings that are `distances` further in the list."""
    whole = torch.arange(prod(shape), dtype=torch.float64).view(shape)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("xyz"[: len(sizes)]))
    saved = _each_way(whole, mesh)
    parts = {name: local_part(tensor) for name, tensor in saved.items()}
    write_chunks(folder, held_chunks(dict(saved)), lambda chunk: parts[chunk.name], doing="saving")
    wrong = []
    names = list(saved)
    for distance in distances or range(len(names)):
        targets = [names[(i + distance) % len(names)] for i in range(len(names))]
        loaded: dict[str, Tensor] = {
            name: type(saved[target])(
                torch.zeros_like(parts[target]), saved[target]._spec, requires_grad=False
            )
            for name, target in zip(names, targets, strict=True)
        }
        read_tensors(loaded, folder)
        for (name, tensor), target in zip(loaded.items(), targets, strict=True):
            if not torch.equal(local_part(tensor), parts[target]):
                wrong.append(f"{name} -> {target}")
    plain: dict[str, Tensor] = {name: torch.zeros_like(whole) for name in names}
    read_tensors(plain, folder)
    wrong += [
        f"{name} -> plain" for name, tensor in plain.items() if not torch.equal(tensor, whole)
    ]
    if checksums(dict(saved)) != checksums(plain):
        wrong.append("checksums")
    return len(names), wrong


# 11 shardings of a matrix over two axes, 49 over three. Those with a strided shard, 2 and 22, are
# also said beside the placements, and only there where they do not divide.
@pytest.mark.parametrize(
    ("sizes", "shape", "distances", "number"),
    tiered(
        [((2, 2), (8, 4), [], 11 + 2), ((2, 2), (5, 3), [], 9 + 2)],
        slow=[
            ((2, 2, 2), (16, 8), [1, 7, 20, 40], 49 + 22),
            ((2, 2, 2), (7, 9), [1, 7, 20, 40], 27 + 22),
        ],
    ),
)
def test_orders_of_axes_load_under_others(
    tmp_path: Path, sizes: Sizes, shape: Sizes, distances: list[int], number: int
) -> None:
    world = torch.Size(sizes).numel()
    found = run_on_ranks(_save_and_load, world, sizes, shape, distances, tmp_path)
    assert found == [(number, [])] * world


@pytest.mark.parametrize("sizes", [(3, 2), (4, 2), (2, 2, 2), (2, 3, 2), (3, 2, 2)])
def test_strided_shards_that_are_not_refused_lie_where_torch_says(sizes: tuple[int, ...]) -> None:
    axes = dict(zip("xyz", sizes, strict=False))
    refused = 0
    for order, size in product(permutations(axes), range(1, 26)):
        sharding = Sharding((order,))
        placements = placements_of(sharding, axes)
        try:
            check_divides(sharding, axes, placements, (size,))
        except ValueError:
            refused += 1
            continue
        for rank in range(prod(sizes)):
            place = coordinates(rank, axes)
            (length,), (begin,) = _compute_local_shape_and_global_offset(
                (size,), sizes, [place[axis] for axis in axes], placements
            )
            (box,) = sharding.box(rank, (size,), axes)
            assert length == box.stop - box.start
            assert length == 0 or begin == box.start, (str(sharding), size, rank)
    assert refused
