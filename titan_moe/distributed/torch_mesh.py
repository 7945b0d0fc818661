"""All that is private of torch's DeviceMesh: meshes made from one root, over groups that exist.

DeviceMesh's own unflattening and flattening make process groups for every name. What they do beside
that is done here: a layout over the root's ranks, the root itself, and the names of groups.
`tests/unit/distributed/test_torch_mesh.py` names each attribute that is used.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, _mesh_layout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

Spans = Sequence[tuple[int, int]]
"""Sizes and strides, in places of the root, of the parts of one axis; none of them adjoin."""


class _MeshOfRank(DeviceMesh):
    """A mesh as a given rank has it. DeviceMesh asks the world's group which rank it is wherever
    the tensor of a slice is read, its constructor included."""

    def __init__(self, *arguments: Any, _rank: int, **options: Any) -> None:
        self._rank = _rank
        super().__init__(*arguments, _rank=_rank, **options)

    @property
    def mesh(self) -> torch.Tensor:
        whole = self._layout.remap_to_tensor(self._rank_map)
        return self._get_mesh_tensor_from_full_mesh(whole, self._rank)

    def get_rank(self) -> int:
        return self._rank


def root_mesh(device_type: str, ranks: torch.Tensor, rank: int, *, connected: bool) -> DeviceMesh:
    """All ranks along the one axis `world`. `connected`: this process is `rank` of a world."""
    kind = DeviceMesh if connected else _MeshOfRank
    return kind(
        device_type,
        ranks,
        mesh_dim_names=("world",),
        _init_backend=False,
        _rank=rank,
    )


def derived_mesh(root: DeviceMesh, names: Sequence[str], axes: Sequence[Spans]) -> DeviceMesh:
    """A mesh over the root's ranks; it has no groups yet."""
    mesh = type(root)(
        root.device_type,
        mesh_dim_names=tuple(names),
        _init_backend=False,
        _rank=root._rank,
        _layout=_layout_of(axes),
        _rank_map=root._rank_map,
        _root_mesh=root,
    )
    # A number for each rank of the world, in every mesh: one copy is enough.
    mesh._flatten_rank_map = root._flatten_rank_map
    return mesh


def _layout_of(axes: Sequence[Spans]) -> _mesh_layout._MeshLayout:
    sizes = [tuple(size for size, _ in spans) for spans in axes]
    strides = [tuple(stride for _, stride in spans) for spans in axes]
    flat = getattr(_mesh_layout, "_FlatLayout", None)
    if flat is not None:
        return _mesh_layout._MeshLayout([flat(*axis) for axis in zip(sizes, strides, strict=True)])
    # Torch 2.11: tuples of all axes, in which an axis of one part is a number, as is a mesh of one
    # such axis once it is flattened.
    numbers = [tuple(e[0] if len(e) == 1 else e or 1 for e in each) for each in (sizes, strides)]
    if len(axes) == 1 and len(axes[0]) < 2:
        numbers = [each[0] for each in numbers]  # type: ignore[misc]
    return _mesh_layout._MeshLayout(*numbers)  # type: ignore[call-arg,arg-type]


def set_groups(mesh: DeviceMesh, groups: Sequence[ProcessGroup | None]) -> None:
    """Give each axis its group. One that has none yet says so when torch looks for it."""
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
    """Let torch take a mesh of one axis for the axes that it joins, as DeviceMesh._flatten does."""
    (name,) = mesh.mesh_dim_names or ()
    mesh._get_root_mesh()._flatten_mapping[name] = mesh
