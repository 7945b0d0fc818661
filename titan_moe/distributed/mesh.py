"""The meshes that shard parameters and route tokens: one root over the world, and views of it.

    meshes = build_mesh(dims, "cuda")
    meshes["dp_replicate", "fsdp"]      the DeviceMesh of two axes
    meshes.group("ep")                  the process group of one
    meshes.group(("edp", "ep"))         and of several axes joined

Torch unflattens the root into views and slices them, over groups that this package makes and
shares. Those that every run needs are made at once, all others when they are asked for.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from titan_moe.config.job_config import Comm
from titan_moe.distributed.parallel_dims import (
    AXES,
    DENSE_AXES,
    DERIVED_AXES,
    GROUP_AXES,
    SPARSE_AXES,
    TOKEN_AXES,
    Names,
    ParallelDims,
    primary_axes,
)
from titan_moe.distributed.process_groups import GroupOptions, ProcessGroups, Traffic
from titan_moe.distributed.torch_mesh import register_flattened, root_mesh, set_groups, unflatten


@dataclass(frozen=True)
class Meshes:
    """Every mesh of a run, for this rank.

    Asking for a mesh or a group for the first time makes process groups: all ranks do it, in the
    same order.
    """

    dims: ParallelDims
    rank: int
    root: DeviceMesh
    groups: ProcessGroups = field(repr=False)
    comm: Comm = field(default_factory=Comm)
    _made: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False)
    _groups: dict[Names, ProcessGroup] = field(default_factory=dict, repr=False)

    def __getitem__(self, names: Names) -> DeviceMesh:
        """The mesh of one or more axes, primary or derived, in the order that the views have; they
        need not adjoin."""
        names = (names,) if isinstance(names, str) else tuple(names)
        if names not in self._made:
            _check_order(names)
            view = self._unflattened(_axes_with(names))
            made = [self.group(a) if a in names else None for a in view.mesh_dim_names or ()]
            set_groups(view, made)
            self._made[names] = view[names]
            if len(names) == 1 and names[0] in DERIVED_AXES:
                register_flattened(self._made[names])
        return self._made[names]

    def group(self, names: Names) -> ProcessGroup:
        """The process group of an axis, primary or derived, or of several axes joined: the ranks
        that differ from this one along these only, ascending."""
        key = names if isinstance(names, str) else tuple(names)
        if key not in self._groups:
            self._groups[key] = self._make_group(self._shortest(names))
        return self._groups[key]

    def known_group(self, names: Names) -> ProcessGroup | None:
        """Returns the group that `group` would, if it exists already; else None."""
        names = self._shortest(names)
        return self.groups.known(self.members(names), self._options(names))

    def members(self, names: Names) -> tuple[int, ...]:
        """The world's ranks that differ from this one along these axes only, itself included."""
        return self.dims.group_of(self.rank, names)

    def all_groups(self) -> list[ProcessGroup]:
        """Every group of this rank, the world's included."""
        return [dist.group.WORLD, *self.groups.all()]  # type: ignore[list-item]

    def _unflattened(self, names: tuple[str, ...]) -> DeviceMesh:
        key = ("view", *names)
        if key not in self._made:
            self._made[key] = unflatten(self.root, {axis: self.dims.size(axis) for axis in names})
        return self._made[key]

    def _make_group(self, names: Names) -> ProcessGroup:
        return self.groups.get(self.members(names), self._options(names), self._description(names))

    def _shortest(self, names: Names) -> Names:
        """One axis instead of several, where it is the same ranks."""
        if isinstance(names, str):
            return names
        ranks = self.members(names)
        primary = tuple(axis for axis in primary_axes(names) if self.dims.size(axis) > 1)
        if len(primary) == 1:
            return primary[0]
        same = (each for each in DERIVED_AXES if self.members(each) == ranks)
        return next(same, primary or names)

    def _options(self, names: Names) -> GroupOptions:
        tokens = isinstance(names, str) and names in TOKEN_AXES
        return GroupOptions(Traffic.TOKENS if tokens else Traffic.PARAMETERS, self.comm)

    def _description(self, names: Names) -> str:
        """The axes of a group, all that share it."""
        if not isinstance(names, str):
            return ",".join(names)
        kind = self.members(names), self._options(names)
        every = (*AXES, *DERIVED_AXES)
        return "+".join(each for each in every if (self.members(each), self._options(each)) == kind)


def build_mesh(
    dims: ParallelDims,
    device_type: str,
    comm: Comm | None = None,
    groups: ProcessGroups | None = None,
) -> Meshes:
    """Returns the meshes and makes the groups that every run needs. Collective over all ranks.

    Args:
        comm: limits of the groups; left out, the defaults.
        groups: those of another layout of the same world, used again.

    Raises ValueError if the world's size is not that of `dims`.
    """
    if dist.get_world_size() != dims.world_size:
        raise ValueError(f"{dims.world_size} ranks in a world of {dist.get_world_size()}")
    groups = ProcessGroups() if groups is None else groups
    root = root_mesh(device_type, torch.arange(dims.world_size))
    meshes = Meshes(dims, dist.get_rank(), root, groups, comm or Comm())
    for axis in GROUP_AXES:
        meshes.group(axis)
    meshes["fsdp"]  # Torch then knows that it joins two axes.
    return meshes


def connect(meshes: Meshes, device: torch.device) -> None:
    """Makes the communicators of all groups that there are, while memory is free. Collective.

    NCCL makes a group's communicator, and its buffers, in the group's first collective. Left to the
    step, the world's would come at its end, where a rank without memory for it leaves the others
    waiting, and a pipeline's in its first batch of sends, which has two of the group's ranks and
    would wait for ever. All ranks connect the groups in the order in which they made them, then the
    world, then the pairs of an exchange over `ep`.
    """
    rows = torch.zeros(meshes.dims.ep, device=device)
    for group in (*meshes.groups.all(), meshes.all_groups()[0]):
        if group.size() > 1:
            dist.all_reduce(rows, group=group)
    if meshes.dims.ep > 1:
        dist.all_to_all_single(torch.empty_like(rows), rows, group=meshes.group("ep"))
    rows.cpu()  # Waits for all of them.


def _axes_with(names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of the view that has `names`, each derived axis in place of those it joins."""
    primary = primary_axes(names)
    view = DENSE_AXES if set(primary) <= set(DENSE_AXES) else SPARSE_AXES
    derived = {DERIVED_AXES[name]: name for name in names if name in DERIVED_AXES}
    joined = {axis: name for parts, name in derived.items() for axis in parts}
    return tuple(dict.fromkeys(joined.get(axis, axis) for axis in view))


def _check_order(names: tuple[str, ...]) -> None:
    """Raises ValueError unless the axes stand as in the mesh."""
    parts = [part for name in names for part in primary_axes(name)]
    ordered = primary_axes(names)
    if tuple(parts) != ordered:
        inside = sorted(names, key=lambda name: ordered.index(primary_axes(name)[0]))
        raise ValueError(
            f"the axes {', '.join(names)} stand in the mesh in the order {', '.join(inside)}"
        )
