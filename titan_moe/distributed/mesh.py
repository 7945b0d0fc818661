"""The meshes that shard parameters and route tokens: one root over the world, and views of it.

    meshes = dims.build_mesh("cuda")
    meshes["dp_replicate", "fsdp"]      the DeviceMesh of two axes
    meshes.group("ep")                  the process group of one
    meshes.group(("edp", "ep"))         and of several axes joined
    meshes.view(("dp_replicate", "fsdp", "tp"))     what a plan of redistribution runs on

Meshes are torch DeviceMeshes of one root, over groups that this package makes and shares. Those of
FSDP2 and of the exchanges in every layer are made at once, all others when they are asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from titan_moe.distributed.parallel_dims import (
    AXES,
    DENSE_AXES,
    DERIVED_AXES,
    SPARSE_AXES,
    Names,
    ParallelDims,
    primary_axes,
)
from titan_moe.distributed.process_groups import GroupOptions, ProcessGroups, Traffic
from titan_moe.distributed.sharding import Axes
from titan_moe.distributed.torch_mesh import (
    Spans,
    derived_mesh,
    register_flattened,
    root_mesh,
    set_groups,
)

# All ranks make these groups first, in this order.
_EVERY_RUN = ("pp", "dp_replicate", "fsdp", "tp", "edp", "ep", "etp")
_TOKEN_AXES = frozenset({"pp", "cp", "tp", "sequence", "ep", "etp"})


@dataclass(frozen=True)
class Meshes:
    """Every mesh of a run, for this rank.

    Asking for a mesh or a group for the first time makes process groups: all ranks do it, in the
    same order.
    """

    dims: ParallelDims
    rank: int
    """This rank's place in the job; its number in the world is `ranks[rank]`."""
    ranks: Sequence[int] = field(repr=False)
    root: DeviceMesh
    groups: ProcessGroups = field(repr=False)
    timeout: timedelta | None = None
    is_connected: bool = True
    """Whether there are process groups; without them, meshes know sizes and places alone."""
    _made: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False)
    _groups: dict[Names, ProcessGroup] = field(default_factory=dict, repr=False)

    @property
    def dense(self) -> DeviceMesh:
        """The five-axis view of what all tokens meet; it has the groups made so far."""
        return self._five_axes(DENSE_AXES)

    @property
    def sparse(self) -> DeviceMesh:
        """The five-axis view of the routed experts; it has the groups made so far."""
        return self._five_axes(SPARSE_AXES)

    def __getitem__(self, names: Names) -> DeviceMesh:
        """The mesh of one or more axes, primary or derived, in the order that the views have; they
        need not adjoin."""
        names = (names,) if isinstance(names, str) else tuple(names)
        if names not in self._made:
            self._made[names] = self._sliced(names)
        return self._made[names]

    def joined(self, names: Names) -> DeviceMesh:
        """The mesh of one axis that joins several, such as `edp_ep` of edp and ep, on which torch
        then gathers over all of them at once."""
        name = "_".join(primary_axes(names))
        key = ("joined", name)
        if key not in self._made:
            mesh = derived_mesh(self.root, [name], [self.dims.spans(names)])
            if self.is_connected:
                set_groups(mesh, [self.group(names)])
                register_flattened(mesh)
            self._made[key] = mesh
        return self._made[key]

    def group(self, names: Names) -> ProcessGroup:
        """The process group of an axis, primary or derived, or of several axes joined: the ranks
        that differ from this one along these only, ascending."""
        if not self.is_connected:
            raise RuntimeError(
                f"the meshes of rank {self.ranks[self.rank]} have no process groups: they were "
                f"built with rank=, for planning"
            )
        key = names if isinstance(names, str) else tuple(names)
        if key not in self._groups:
            self._groups[key] = self._make_group(self._shortest(names))
        return self._groups[key]

    def known_group(self, names: Names) -> ProcessGroup | None:
        """As `group`, if it was made already."""
        if not self.is_connected:
            return None
        names = self._shortest(names)
        return self.groups.known(self.members(names), self._options(names))

    def members(self, names: Names) -> tuple[int, ...]:
        """The world's ranks that differ from this one along these axes only, itself included."""
        places = self.dims.group_of(self.rank, names)
        is_whole = self.ranks == range(self.dims.world_size)
        return places if is_whole else tuple(self.ranks[place] for place in places)

    def all_groups(self) -> list[ProcessGroup]:
        """Every group of this rank, the world's included."""
        return [dist.group.WORLD, *self.groups.all()]  # type: ignore[list-item]

    def view(self, names: Names) -> "View":
        """These axes as `redistribution.execute` wants them."""
        names = (names,) if isinstance(names, str) else tuple(names)
        _check_order(names)
        axes = {name: self.dims.size(name) for name in names}
        return View(axes, self.dims.coordinate(self.rank, names), self)

    def _five_axes(self, names: tuple[str, ...]) -> DeviceMesh:
        key = ("view", *names)
        if key not in self._made:
            axes = [self.dims.spans(axis) for axis in names]
            self._made[key] = derived_mesh(self.root, names, axes)
        if self.is_connected:
            set_groups(self._made[key], [self.known_group(axis) for axis in names])
        return self._made[key]

    def _sliced(self, names: tuple[str, ...]) -> DeviceMesh:
        _check_order(names)
        mesh = derived_mesh(self.root, names, [self.dims.spans(name) for name in names])
        if self.is_connected:
            set_groups(mesh, [self.group(name) for name in names])
            if len(names) == 1 and names[0] in DERIVED_AXES:
                register_flattened(mesh)
        return mesh

    def _make_group(self, names: Names) -> ProcessGroup:
        description = self._description(names)
        return self.groups.get(self.members(names), self._options(names), description)

    def _shortest(self, names: Names) -> Names:
        """One axis instead of several, where it is the same ranks."""
        if isinstance(names, str):
            return names
        spans = self.dims.spans(names)
        primary = tuple(axis for axis in primary_axes(names) if self.dims.size(axis) > 1)
        if len(primary) == 1:
            return primary[0]
        same = (each for each in DERIVED_AXES if self.dims.spans(each) == spans)
        return next(same, primary or names)

    def _options(self, names: Names) -> GroupOptions:
        tokens = isinstance(names, str) and names in _TOKEN_AXES
        return GroupOptions(Traffic.TOKENS if tokens else Traffic.PARAMETERS, self.timeout)

    def _description(self, names: Names) -> str:
        """The axes of a group, all that share it."""
        if not isinstance(names, str):
            return ",".join(names)
        return "+".join(self._sharing[self.dims.spans(names), self._options(names)])

    @cached_property
    def _sharing(self) -> dict[tuple[Spans, GroupOptions], list[str]]:
        """The axes that are the same ranks, by what they ask of a group."""
        sharing: dict[tuple[Spans, GroupOptions], list[str]] = {}
        for name in (*AXES, *DERIVED_AXES):
            key = self.dims.spans(name), self._options(name)
            sharing.setdefault(key, []).append(name)
        return sharing


@dataclass
class View:
    """Axes of a mesh by name, outermost first, and this rank's number among their ranks."""

    axes: Axes
    rank: int
    meshes: Meshes = field(repr=False)

    def group(self, axes: Sequence[str]) -> ProcessGroup:
        """The ranks that differ from this one along these axes only, in ascending order."""
        return self.meshes.group(tuple(axes))


def build_mesh(
    dims: ParallelDims,
    device_type: str,
    timeout: timedelta | None = None,
    groups: ProcessGroups | None = None,
    ranks: Sequence[int] | None = None,
    rank: int | None = None,
) -> Meshes:
    """As `ParallelDims.build_mesh` says."""
    is_connected = rank is None
    own = dist.get_rank() if rank is None else rank
    if ranks is None:
        ranks = range(dims.world_size)
        if is_connected and dist.get_world_size() != len(ranks):
            raise ValueError(
                f"a layout of {len(ranks)} ranks in a world of {dist.get_world_size()}: say with "
                f"ranks= which they are"
            )
    # A range's tensor takes no Python number for each rank of the world.
    numbers = (
        torch.arange(ranks.start, ranks.stop, ranks.step)
        if isinstance(ranks, range)
        else torch.tensor(ranks)
    )
    if len(ranks) != dims.world_size or not bool((numbers.diff() > 0).all()):
        raise ValueError(f"a layout of {dims.world_size} ranks needs as many, ascending: {ranks}")
    if own not in ranks:
        raise ValueError(f"rank {own} is none of the job's: {ranks[0]} to {ranks[-1]}")
    root = root_mesh(device_type, numbers, own, connected=is_connected)
    groups = ProcessGroups() if groups is None else groups
    meshes = Meshes(dims, ranks.index(own), ranks, root, groups, timeout, is_connected)
    if is_connected:
        for axis in _EVERY_RUN:
            meshes.group(axis)
        meshes["fsdp"]  # Torch then knows that it joins two axes.
    return meshes


def _check_order(names: tuple[str, ...]) -> None:
    """Raises ValueError unless the axes stand as in the mesh."""
    parts = [part for name in names for part in primary_axes(name)]
    ordered = primary_axes(names)
    if tuple(parts) != ordered:
        inside = sorted(names, key=lambda name: ordered.index(primary_axes(name)[0]))
        raise ValueError(
            f"the axes {', '.join(names)} stand in the mesh in the order {', '.join(inside)}"
        )
