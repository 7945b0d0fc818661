"""Degrees of parallelism -> the dense and the sparse view of the world, by arithmetic.

Ranks are numbered row-major, pp outermost and tp innermost. Both views unflatten the same world:

    dense   (pp, dp_replicate, dp_shard, cp, tp)    attention, router, shared experts, norms, ...
    sparse  (pp, dp_replicate, edp,      ep, etp)   routed experts

so edp * ep * etp == dp_shard * cp * tp ("parallel folding", arXiv 2504.14960).

    meshes = ParallelDims(8, tp=2, ep=2).build_mesh("cuda")

makes both as torch's meshes: one root over the world, which torch unflattens and slices
(`torch_mesh.py`), over groups that names share (`process_groups.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

from titan_moe.config.job_config import DEGREES, Parallelism, shard_degree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from titan_moe.distributed.process_groups import GroupKind, ProcessGroups
    from titan_moe.distributed.torch_mesh import RootMesh

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SPARSE_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")
AXES = tuple(dict.fromkeys((*DENSE_AXES, *SPARSE_AXES)))
"""Every primary axis, once."""
DERIVED_AXES: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("dp_shard", "cp"),  # torchtitan's dp_shard_cp.
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "sequence": ("cp", "tp"),
}
GROUP_AXES = ("pp", "dp_replicate", "fsdp", "tp", "edp", "ep", "etp")
"""The axes whose groups all ranks make first, in this order."""
TOKEN_AXES = frozenset({"pp", "cp", "tp", "sequence", "ep", "etp"})
"""The axes over which tokens travel, and not parameters."""

Names = str | Sequence[str]
"""One axis, primary or derived, or several."""
Axes = Mapping[str, int]
"""The axes of a mesh, outermost first, and their sizes. Ranks are numbered row-major."""


def primary_axes(names: Names) -> tuple[str, ...]:
    """The primary axes that `names` join, in the mesh's order.

    Raises ValueError with one line for an unknown name, for names of which no view has all, and for
    names that share an axis.
    """
    return _primary_axes((names,) if isinstance(names, str) else tuple(names))


@lru_cache
def _primary_axes(names: tuple[str, ...]) -> tuple[str, ...]:
    known = (*AXES, *DERIVED_AXES)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no mesh axis {', '.join(unknown)}: the axes are {', '.join(known)}")
    parts = [part for name in names for part in DERIVED_AXES.get(name, (name,))]
    if twice := sorted({part for part in parts if parts.count(part) > 1}):
        raise ValueError(f"{', '.join(names)} overlap: {', '.join(twice)} is in two of them")
    for view in (DENSE_AXES, SPARSE_AXES):
        if set(parts) <= set(view):
            return tuple(axis for axis in view if axis in parts)
    raise ValueError(
        f"no view of the mesh has all of {', '.join(names)}: dense ({', '.join(DENSE_AXES)}) or "
        f"sparse ({', '.join(SPARSE_AXES)})"
    )


@dataclass(frozen=True)
class ParallelDims:
    """Validated sizes of every mesh axis.

    `dp_shard=-1` means the rest of the world. Raises ValueError where the sizes do not multiply up;
    the configuration checks say the same to a user, earlier and with the remedy.
    """

    world_size: int
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    edp: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = {axis: getattr(self, axis) for axis in DEGREES}
        if min(size for axis, size in sizes.items() if axis != "dp_shard") < 1:
            raise ValueError(f"every degree must be at least 1: {sizes}")
        shard = shard_degree(sizes, self.world_size)
        if shard is None:
            raise ValueError(f"{sizes}: the dense axes do not make {self.world_size} ranks")
        edp, rest = divmod(shard * self.cp * self.tp, self.ep * self.etp)
        if rest:
            raise ValueError(f"{sizes}: ep*etp must divide dp_shard*cp*tp, with dp_shard={shard}")
        object.__setattr__(self, "dp_shard", shard)
        object.__setattr__(self, "edp", edp)

    def size(self, names: Names) -> int:
        """Number of ranks along an axis, or along several joined."""
        return prod(int(getattr(self, axis)) for axis in primary_axes(names))

    @property
    def sizes(self) -> Axes:
        """The size of every primary axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    def coordinate(self, rank: int, names: Names) -> int:
        """Returns a rank's coordinate along an axis, or its row-major number along several."""
        number, at = 0, coordinates(rank, self._view(names))
        for axis in primary_axes(names):
            number = number * self.size(axis) + at[axis]
        return number

    def group_of(self, rank: int, names: Names) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along these axes, itself included, ascending."""
        return tuple(group_of(rank, primary_axes(names), self._view(names)))

    def view_with(self, names: Sequence[str]) -> Axes:
        """Returns the sizes of the view that has these axes, each derived axis in place of those
        that it joins. Raises ValueError as `primary_axes` does, and unless the names stand in the
        view's order."""
        joined = {axis: name for name in names for axis in DERIVED_AXES.get(name, (name,))}
        view = dict.fromkeys(joined.get(axis, axis) for axis in self._view(names))
        if (inside := [axis for axis in view if axis in names]) != list(names):
            raise ValueError(
                f"the axes {', '.join(names)} stand in the mesh in the order {', '.join(inside)}"
            )
        return {axis: self.size(axis) for axis in view}

    def shortest(self, rank: int, names: Names) -> Names:
        """Returns one axis instead of several, where it is the same ranks."""
        if isinstance(names, str):
            return names
        ranks = self.group_of(rank, names)
        one = (axis for axis in primary_axes(names) if self.group_of(rank, axis) == ranks)
        derived = (axis for axis in DERIVED_AXES if self.group_of(rank, axis) == ranks)
        return next(chain(one, derived), tuple(names))

    def build_mesh(self, device_type: str, groups: "ProcessGroups | None" = None) -> "Meshes":
        """Returns both views of the world as torch's meshes, and makes the groups that every run
        needs. Collective over all ranks.

        Args:
            groups: those of another layout of the same world, used again, or empty ones with
                options; left out, new ones.

        Raises ValueError if the world's size is not that of these degrees.
        """
        # Checks of a configuration and the memory estimate do without torch.
        import torch.distributed as dist

        from titan_moe.distributed.process_groups import ProcessGroups
        from titan_moe.distributed.torch_mesh import RootMesh

        if dist.get_world_size() != self.world_size:
            raise ValueError(f"{self.world_size} ranks in a world of {dist.get_world_size()}")
        groups = groups or ProcessGroups(device=device_type)
        meshes = Meshes(self, dist.get_rank(), RootMesh(device_type, self.world_size), groups)
        for axis in GROUP_AXES:
            meshes.group(axis)
        meshes["fsdp"]  # torch then knows that it joins two axes.
        return meshes

    def ranks_on_node(self, ranks_per_node: int) -> int | None:
        """Returns the number of ranks of an ep group on each of several nodes. None where the group
        is on one node, where each node has one rank of it, and where nodes do not cut it evenly."""
        size = ranks_per_node // self.etp
        even = ranks_per_node % self.etp == 0 and size > 0 and self.ep % size == 0
        return size if even and size not in (1, self.ep) else None

    def _view(self, names: Names) -> Axes:
        view = DENSE_AXES if set(primary_axes(names)) <= set(DENSE_AXES) else SPARSE_AXES
        return {axis: getattr(self, axis) for axis in view}


@dataclass(frozen=True)
class Meshes:
    """Every mesh of a run, and its process groups, for this rank.

        meshes["dp_replicate", "fsdp"]      the DeviceMesh of two axes
        meshes.group("ep")                  the process group of one
        meshes.group(("edp", "ep"))         and of several axes joined

    Names of the same ranks share a group, unless tokens travel over one and parameters over
    another: with pp 2, dp_shard 4, tp 2 and ep 4 a rank makes 6 groups, where torch's unflattening
    and flattening makes 124. Asking for a mesh or a group for the first time makes process groups:
    all ranks do it, in the same order.
    """

    dims: ParallelDims
    rank: int
    root: "RootMesh"
    groups: "ProcessGroups" = field(repr=False)
    _made: "dict[tuple[str, ...], DeviceMesh]" = field(default_factory=dict, repr=False)

    def __getitem__(self, names: Names) -> "DeviceMesh":
        """The mesh of one or more axes, primary or derived, in the order that the views have; they
        need not adjoin."""
        names = (names,) if isinstance(names, str) else tuple(names)
        if names not in self._made:
            view = self.dims.view_with(names)
            groups = {axis: self.group(axis) for axis in names}
            is_joined = len(names) == 1 and names[0] in DERIVED_AXES
            self._made[names] = self.root.submesh(view, groups, is_joined=is_joined)
        return self._made[names]

    def group(self, names: Names) -> "ProcessGroup":
        """The process group of an axis, primary or derived, or of several axes joined: the ranks
        that differ from this one along these only, ascending."""
        names = self.dims.shortest(self.rank, names)
        return self.groups.get(self.members(names), self._kind(names), self._description(names))

    def gradient_group(self, axis: str) -> "ProcessGroup":
        """The process group over which gradients of parameters sharded along `axis` are reduced:
        that of the axis, or with `comm.separate_reduce_scatter` one of its own."""
        if not self.groups.comm.separate_reduce_scatter:
            return self.group(axis)
        kind, description = ("gradients", self._kind(axis)[1]), self._description(axis)
        return self.groups.get(self.members(axis), kind, f"gradients of {description}")

    def known_groups(self, axis: str) -> "list[ProcessGroup]":
        """Returns those that `group` and `gradient_group` would and that exist already."""
        traffic, options = kind = self._kind(axis)
        kinds = [kind, ("gradients", options)] if traffic == "parameters" else [kind]
        found = (self.groups.known(self.members(axis), kind) for kind in kinds)
        return [group for group in found if group is not None]

    def members(self, names: Names) -> tuple[int, ...]:
        """The world's ranks that differ from this one along these axes only, itself included."""
        return self.dims.group_of(self.rank, names)

    def _kind(self, names: Names) -> "GroupKind":
        """Returns the class of traffic, and the options of an axis' own."""
        if not isinstance(names, str):
            return "parameters", None
        traffic = "tokens" if names in TOKEN_AXES else "parameters"
        return traffic, self.groups.comm.axes.get(names)  # type: ignore[call-overload]

    def _description(self, names: Names) -> str:
        """The axes of a group, all that share it."""
        if not isinstance(names, str):
            return ",".join(names)
        group = self.members(names), self._kind(names)
        every = (*AXES, *DERIVED_AXES)
        return "+".join(each for each in every if (self.members(each), self._kind(each)) == group)


def parallel_dims(parallelism: Parallelism, world_size: int) -> ParallelDims:
    """The mesh axes of a config."""
    return ParallelDims(world_size, **parallelism.degrees)


def coordinates(rank: int, axes: Axes) -> dict[str, int]:
    """Returns a rank's coordinate along each axis."""
    place = {}
    for axis, size in reversed(list(axes.items())):
        rank, place[axis] = divmod(rank, size)
    return place


def group_of(rank: int, axes: Sequence[str], mesh: Axes) -> list[int]:
    """The ranks that differ from `rank` along these axes only, itself included, ascending."""
    place, strides = coordinates(rank, mesh), {}
    stride = 1
    for axis, size in reversed(list(mesh.items())):
        strides[axis], stride = stride, stride * size
    first = rank - sum(place[axis] * strides[axis] for axis in axes)
    members = [first]
    for axis in axes:
        members = [member + i * strides[axis] for member in members for i in range(mesh[axis])]
    return sorted(members)
