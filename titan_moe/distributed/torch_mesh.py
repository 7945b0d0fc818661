"""Builds meshes over process groups that exist already, which torch's DeviceMesh does not offer.

Torch unflattens and slices the root mesh. Its own groups would be one per name of an axis; here a
mesh without groups is given those of `process_groups.py`. Every private name of DeviceMesh that the
package uses is in this module and in `tests/unit/distributed/test_torch_mesh.py`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName


def root_mesh(device_type: str, ranks: torch.Tensor) -> DeviceMesh:
    """Returns all ranks along the one axis `world`, without process groups."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=("world",), _init_backend=False)


def unflatten(root: DeviceMesh, sizes: Mapping[str, int]) -> DeviceMesh:
    """Returns the root as axes of these sizes, outermost first, without process groups."""
    return root._unflatten(0, tuple(sizes.values()), tuple(sizes))


def set_groups(mesh: DeviceMesh, groups: Sequence[ProcessGroup | None]) -> None:
    """Gives each axis its group. An axis without one gets a name that torch shows if it looks for
    the group."""
    mesh._dim_group_names = [
        GroupName(f"none of {axis} yet: Meshes makes it when it is asked for")
        if group is None
        else group.group_name
        for axis, group in zip(mesh.mesh_dim_names or (), groups, strict=True)
    ]
    # torch.compile finds groups here.
    registry = mesh._get_root_mesh()._pg_registry
    registry.update({group.group_name: group for group in groups if group is not None})


def register_flattened(mesh: DeviceMesh) -> None:
    """Lets torch use a mesh of one axis for the axes that it joins, as DeviceMesh._flatten does."""
    (name,) = mesh.mesh_dim_names or ()
    mesh._get_root_mesh()._flatten_mapping[name] = mesh
