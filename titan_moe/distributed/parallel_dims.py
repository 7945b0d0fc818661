"""Degrees of parallelism -> the dense and the sparse view of the world, by arithmetic.

Ranks are numbered row-major, pp outermost and tp innermost. Both views unflatten the same world:

    dense   (pp, dp_replicate, dp_shard, cp, tp)    attention, router, shared experts, norms, ...
    sparse  (pp, dp_replicate, edp,      ep, etp)   routed experts

so edp * ep * etp == dp_shard * cp * tp ("parallel folding", arXiv 2504.14960).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from titan_moe.config.job_config import Parallelism

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SPARSE_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")
DERIVED_AXES: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("dp_shard", "cp"),
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "sequence": ("cp", "tp"),
}


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
        sizes = {axis: getattr(self, axis) for axis in (*DENSE_AXES, "ep", "etp")}
        if sizes["dp_shard"] == -1:
            others = self.pp * self.dp_replicate * self.cp * self.tp
            sizes["dp_shard"] = max(1, self.world_size // max(1, others))
            object.__setattr__(self, "dp_shard", sizes["dp_shard"])
        if min(sizes.values()) < 1:
            raise ValueError(f"every degree must be at least 1: {sizes}")
        dense = prod(sizes[axis] for axis in DENSE_AXES)
        if dense != self.world_size:
            raise ValueError(
                f"pp*dp_replicate*dp_shard*cp*tp = {dense}, not {self.world_size} ranks"
            )
        region = self.dp_shard * self.cp * self.tp
        if region % (self.ep * self.etp):
            raise ValueError(f"ep*etp = {self.ep * self.etp} must divide dp_shard*cp*tp = {region}")
        object.__setattr__(self, "edp", region // (self.ep * self.etp))

    def size(self, axis: str) -> int:
        """Number of ranks along a primary or derived axis."""
        if axis in DERIVED_AXES:
            return prod(self.size(part) for part in DERIVED_AXES[axis])
        return int(getattr(self, axis))

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along an axis; a derived axis' parts adjoin."""
        last = DERIVED_AXES.get(axis, (axis,))[-1]
        view = DENSE_AXES if last in DENSE_AXES else SPARSE_AXES
        return prod(self.size(inner) for inner in view[view.index(last) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Where a rank stands along a primary or derived axis."""
        return rank // self.stride(axis) % self.size(axis)

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axis`, itself included, ascending."""
        stride = self.stride(axis)
        first = rank - self.coordinate(rank, axis) * stride
        return tuple(first + i * stride for i in range(self.size(axis)))


def parallel_dims(parallelism: Parallelism, world_size: int) -> ParallelDims:
    """The mesh axes of a config."""
    return ParallelDims(
        world_size=world_size,
        pp=parallelism.pipeline_parallel_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
    )
