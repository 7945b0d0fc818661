"""Describes how a tensor is cut on a mesh, as a value.

    S(0)[ep,edp]S(1)[etp]

reads: tensor dim 0 is cut by `ep` first and what is left of it by `edp`; dim 1 is cut by `etp`.
Axes that are not named hold copies, and `R` names none. The order of the axes of a dim matters:
with 4 ranks, `S(0)[ep,edp]` gives rank (edp=0, ep=1) the third quarter, and `S(0)[edp,ep]` the
second.

A dim that does not divide is cut as torch.chunk does, at each axis anew: all pieces but the last
ones have the same size, and the last ones may be empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Placement

from titan_moe.distributed.boxes import Box
from titan_moe.distributed.parallel_dims import Axes, coordinates


@dataclass(frozen=True)
class Sharding:
    """Holds what each axis of a mesh means for a tensor: parts or copies."""

    cuts: tuple[tuple[str, ...], ...] = ()
    """The axes that cut each tensor dim, outermost first; dims after the last cut one may be left
    out."""

    def __str__(self) -> str:
        cuts = (f"S({dim})[{','.join(axes)}]" for dim, axes in enumerate(self.cuts) if axes)
        return "".join(cuts) or "R"

    def box(self, rank: int, shape: Sequence[int], axes: Axes) -> Box:
        """Returns the slices of the whole tensor that a rank holds."""
        place = coordinates(rank, axes)
        box = []
        for dim, size in enumerate(shape):
            first, last = 0, size
            for axis in self.cuts[dim] if dim < len(self.cuts) else ():
                each = -(-(last - first) // axes[axis])
                first = min(first + place[axis] * each, last)
                last = min(first + each, last)
            box.append(slice(first, last))
        return tuple(box)

    @classmethod
    def of(cls, placements: Sequence[Placement], axes: Axes) -> "Sharding":
        """Returns the sharding of a DTensor's placements. An axis of size 1 that cuts a dim stands
        last there: where it stands changes nothing.

        A `_StridedShard` is an axis that cuts before one to its left in the mesh, which is what
        fully_shard makes of a parameter that is cut already.

        Raises ValueError for placements that no order of axes explains, and for a `Partial`.
        """
        pairs = list(zip(axes, placements, strict=True))
        cuts: dict[int, list[str]] = {}
        # The last axis comes first: an axis' place follows from those to its right that cut before.
        for axis, placement in reversed(pairs):
            if placement.is_replicate():
                continue
            if placement.is_partial():
                raise ValueError(
                    f"{placement!r} on axis {axis}: a tensor whose sum is not taken has no parts; "
                    "call DTensor.redistribute to take it first"
                )
            dim: int = placement.dim  # type: ignore[attr-defined]
            cut = cuts.setdefault(dim, [])
            factor = getattr(placement, "split_factor", 1)
            ahead, place = 1, 0
            while ahead < factor and place < len(cut):
                ahead *= axes[cut[place]]
                place += 1
            if ahead != factor:
                raise ValueError(f"{placement} on axis {axis} fits no order of the axes {cut}")
            cut.insert(len(cut) if axes[axis] == 1 else place, axis)
        return cls(tuple(tuple(cuts.get(d, ())) for d in range(max(cuts, default=-1) + 1)))
