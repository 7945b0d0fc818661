"""Describes how a tensor lies on its mesh, and which part of it this rank holds.

One place answers this for checkpoints and their checksums, Hugging Face folders, initial weights,
Muon, the gradient norm and the layout summary.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from titan_moe.distributed.boxes import Box
from titan_moe.distributed.parallel_dims import Axes
from titan_moe.distributed.sharding import Sharding


def sharding_of(tensor: Tensor) -> tuple[Sharding, Axes]:
    """Returns a tensor's sharding, and its mesh's axes with their sizes. A plain tensor is whole,
    on a mesh without axes.

    The order of cuts is that of `_StridedShard` placements, as fully_shard makes them, or else that
    of an explicit `shard_order`.

    Raises:
        ValueError: a strided shard of a dim that does not divide. torch cuts it otherwise than
            fully_shard does, which makes chunks of chunks.
    """
    if not isinstance(tensor, DTensor):
        return Sharding(), {}
    axes = mesh_axes(tensor.device_mesh)
    # torch keeps an order beside the placements, and has no public way to ask for it.
    order = getattr(tensor._spec, "shard_order", None)
    return _sharding(tuple(axes.items()), tensor.placements, order, tensor.shape), axes


# The gradient norm asks at every step, for every parameter.
@lru_cache(maxsize=4096)
def _sharding(
    axes: tuple[tuple[str, int], ...],
    placements: tuple[Placement, ...],
    order: tuple[Any, ...] | None,
    shape: torch.Size,
) -> Sharding:
    sharding = Sharding.of(placements, dict(axes))
    if any(isinstance(placement, _StridedShard) for placement in placements):
        check_divides(sharding, dict(axes), placements, shape)
    elif order:
        cuts = {entry.tensor_dim: tuple(axes[i][0] for i in entry.mesh_dims) for entry in order}
        return Sharding(tuple(cuts.get(dim, ()) for dim in range(len(shape))))
    return sharding


def check_divides(
    sharding: Sharding, axes: Axes, placements: Sequence[Placement], shape: Sequence[int]
) -> None:
    """Raises ValueError for a strided shard of a dim that its cuts do not divide."""
    pairs = zip(axes, placements, strict=True)
    strided = {axis for axis, each in pairs if isinstance(each, _StridedShard) and axes[axis] > 1}
    for size, cut in zip(shape, sharding.cuts, strict=False):
        last = max((place for place, axis in enumerate(cut) if axis in strided), default=0)
        if size % (parts := prod(axes[axis] for axis in cut[:last])):
            raise ValueError(
                f"{sharding} of {list(shape)} on a mesh of {axes}: {parts} does not divide {size}, "
                "as it must for a strided shard"
            )


def mesh_axes(mesh: DeviceMesh) -> Axes:
    """The axes and their sizes, outermost first; without names they go by their numbers."""
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return dict(zip(names, mesh.shape, strict=True))


def mesh_rank(mesh: DeviceMesh) -> int:
    """This rank's number among those of the mesh, which `Sharding.box` takes."""
    number = 0
    for size, at in zip(mesh.shape, mesh.get_coordinate() or (), strict=True):
        number = number * size + at
    return number


def local_part(tensor: Tensor) -> Tensor:
    """The part this rank holds, sharing memory; a plain tensor is held whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: Tensor) -> Box:
    """Returns the slices of the whole tensor that this rank holds.

    Raises ValueError for a layout that `sharding_of` rejects.
    """
    sharding, axes = sharding_of(tensor)
    rank = mesh_rank(tensor.device_mesh) if isinstance(tensor, DTensor) else 0
    return sharding.box(rank, tensor.shape, axes)


def detached(tensor: Tensor) -> Tensor:
    """Detaches a tensor and keeps its explicit `shard_order`, which torch 2.13's `detach` drops:
    that moves parts elsewhere."""
    if isinstance(tensor, DTensor):
        return DTensor(tensor._local_tensor.detach(), tensor._spec, requires_grad=False)
    return tensor.detach()


def cut_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, dims: Sequence[int | None]
) -> None:
    """Replace a parameter, on the meta device, by a DTensor of this rank's part.

    Args:
        dims: the tensor dim that each of the mesh's axes cuts, None where it cuts none; each size
            divides evenly.
    """
    whole = module.get_parameter(name).detach()
    local = whole
    for dim, degree in zip(dims, mesh.shape, strict=True):
        if dim is not None:
            local = local.narrow(dim, 0, local.shape[dim] // degree)
    shards = [Replicate() if dim is None else Shard(dim) for dim in dims]
    # contiguous() keeps the strides of a dim of size 1, and torch derives the whole's from them.
    local = local.clone(memory_format=torch.contiguous_format)
    sharded = DTensor.from_local(local, mesh, shards, run_check=False)
    assert sharded.shape == whole.shape, f"{name} {tuple(whole.shape)} does not divide by {mesh}"
    module.register_parameter(name, nn.Parameter(sharded))
