"""The meshes that shard parameters and route tokens, as torch DeviceMeshes over shared groups."""

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.distributed.process_groups import ProcessGroups, Traffic

# Outermost first. dp_shard and cp stand folded into fsdp: no collective runs over dp_shard alone.
_DENSE_MESH = ("pp", "dp_replicate", "fsdp", "tp")
_SPARSE_MESH = ("pp", "dp_replicate", "edp", "ep", "etp")
_TOKEN_AXES = frozenset({"pp", "cp", "tp", "sequence", "ep", "etp"})


@dataclass(frozen=True)
class Meshes:
    """Every mesh of a run, for this rank.

    `dense` has the axes (pp, dp_replicate, fsdp, tp), `sparse` (pp, dp_replicate, edp, ep, etp).
    """

    dims: ParallelDims
    rank: int
    dense: DeviceMesh
    sparse: DeviceMesh
    groups: ProcessGroups = field(repr=False)

    def __getitem__(self, axis: str) -> DeviceMesh:
        """The one-axis mesh of a name."""
        return self.dense[axis] if axis in _DENSE_MESH else self.sparse[axis]

    def group(self, axis: str) -> ProcessGroup:
        """The process group of an axis, primary or derived."""
        return _group(self.groups, self.dims, self.rank, axis)

    def known_group(self, axis: str) -> ProcessGroup | None:
        """As `group`, if it was made already."""
        return self.groups.known(self.dims.group_of(self.rank, axis), _traffic(axis))

    def all_groups(self) -> list[ProcessGroup]:
        """Every group of this rank, the world's included."""
        return [dist.group.WORLD, *self.groups.all()]  # type: ignore[list-item]


def build_meshes(dims: ParallelDims, device_type: str, timeout: timedelta | None = None) -> Meshes:
    """Make the meshes of an initialised world; collective over all ranks. `timeout`: as in
    ProcessGroups."""
    groups, rank = ProcessGroups(timeout), dist.get_rank()

    def view(axes: tuple[str, ...]) -> DeviceMesh:
        world = torch.arange(dims.world_size, dtype=torch.int)
        members = [_group(groups, dims, rank, axis) for axis in axes]
        # from_group makes no groups of its own, unlike DeviceMesh._unflatten (torch 2.13).
        return DeviceMesh.from_group(
            members,
            device_type,
            mesh=world.view([dims.size(axis) for axis in axes]),
            mesh_dim_names=axes,
        )

    return Meshes(dims, rank, view(_DENSE_MESH), view(_SPARSE_MESH), groups)


def _group(groups: ProcessGroups, dims: ParallelDims, rank: int, axis: str) -> ProcessGroup:
    return groups.get(dims.group_of(rank, axis), _traffic(axis))


def _traffic(axis: str) -> Traffic:
    return Traffic.TOKENS if axis in _TOKEN_AXES else Traffic.PARAMETERS
