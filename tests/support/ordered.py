"""DTensors whose dims are cut by several axes in any order, as torch has two ways to say it."""

from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _dtensor_spec as dtensor_spec
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from titan_moe.distributed.dtensor import mesh_axes
from titan_moe.distributed.sharding import Sharding

EXPLICIT = "shard_order" in {field.name for field in fields(DTensorSpec)}
"""Whether this torch keeps an explicit order beside the placements."""


def strided(whole: Tensor, sharding: Sharding, mesh: DeviceMesh) -> DTensor:
    """The order in the placements."""
    local, meta = _part_of(whole, sharding, mesh)
    spec = DTensorSpec(mesh, sharding.placements(mesh_axes(mesh)), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def explicit(whole: Tensor, sharding: Sharding, mesh: DeviceMesh) -> DTensor:
    """The order beside plain placements. Only where `EXPLICIT`."""
    local, meta = _part_of(whole, sharding, mesh)
    return DTensor(local, explicit_spec(sharding, mesh, meta), requires_grad=False)


def explicit_spec(sharding: Sharding, mesh: DeviceMesh, meta: TensorMeta) -> DTensorSpec:
    names = list(mesh_axes(mesh))
    placements: list[Placement] = [Replicate() for _ in names]
    order = []
    for dim, cut in enumerate(sharding.cuts):
        for axis in cut:
            placements[names.index(axis)] = Shard(dim)
        if cut:
            axes = tuple(map(names.index, cut))
            order.append(dtensor_spec.ShardOrderEntry(tensor_dim=dim, mesh_dims=axes))
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, shard_order=tuple(order))


def _part_of(whole: Tensor, sharding: Sharding, mesh: DeviceMesh) -> tuple[Tensor, TensorMeta]:
    """Cut by chunks of chunks, on a mesh of the whole world."""
    part, place = whole, dict(zip(mesh_axes(mesh), _coordinates(mesh), strict=True))
    for dim, cut in enumerate(sharding.cuts):
        for axis in cut:
            chunks = list(part.chunk(mesh_axes(mesh)[axis], dim)) if part.shape[dim] else []
            empty = [part.narrow(dim, 0, 0)] * mesh_axes(mesh)[axis]
            part = (chunks + empty)[place[axis]]
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return part.contiguous(), meta


def _coordinates(mesh: DeviceMesh) -> list[int]:
    return torch.nonzero(mesh.mesh == dist.get_rank())[0].tolist()
