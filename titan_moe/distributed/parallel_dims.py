"""Degrees of parallelism -> the dense and the sparse view of the world, by arithmetic.

Ranks are numbered row-major, pp outermost and tp innermost. Both views unflatten the same world:

    dense   (pp, dp_replicate, dp_shard, cp, tp)    attention, router, shared experts, norms, ...
    sparse  (pp, dp_replicate, edp,      ep, etp)   routed experts

so edp * ep * etp == dp_shard * cp * tp ("parallel folding", arXiv 2504.14960).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from titan_moe.config.job_config import DEGREES, Parallelism, shard_degree

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SPARSE_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")
AXES = tuple(dict.fromkeys((*DENSE_AXES, *SPARSE_AXES)))
"""Every primary axis, once."""
DERIVED_AXES: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("dp_shard", "cp"),
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
    names = (names,) if isinstance(names, str) else tuple(names)
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

    def coordinate(self, rank: int, names: Names) -> int:
        """Returns a rank's coordinate along an axis, or its row-major number along several."""
        number, at = 0, coordinates(rank, self._view(names))
        for axis in primary_axes(names):
            number = number * self.size(axis) + at[axis]
        return number

    def group_of(self, rank: int, names: Names) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along these axes, itself included, ascending."""
        return tuple(group_of(rank, primary_axes(names), self._view(names)))

    def ranks_on_node(self, ranks_per_node: int) -> int | None:
        """Returns the number of ranks of an ep group on each of several nodes. None where the group
        is on one node, where each node has one rank of it, and where nodes do not cut it evenly."""
        size = ranks_per_node // self.etp
        even = ranks_per_node % self.etp == 0 and size > 0 and self.ep % size == 0
        return size if even and size not in (1, self.ep) else None

    def _view(self, names: Names) -> Axes:
        view = DENSE_AXES if set(primary_axes(names)) <= set(DENSE_AXES) else SPARSE_AXES
        return {axis: self.size(axis) for axis in view}


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
