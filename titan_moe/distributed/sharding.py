"""Describes how a tensor is laid out on a mesh, as a value.

    P[tp]S(0)[ep,edp]S(1)[etp]

reads: a partial sum over `tp`; tensor dim 0 is cut by `ep` first and what is left of it by `edp`;
dim 1 is cut by `etp`. Axes that are not named hold copies, and `R` names none. The order of the
axes of a dim matters: with 4 ranks, `S(0)[ep,edp]` gives rank (edp=0, ep=1) the third quarter, and
`S(0)[edp,ep]` the second.

A dim that does not divide is cut as torch.chunk does, at each axis anew: all pieces but the last
ones have the same size, and the last ones may be empty.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from titan_moe.distributed.boxes import Box
from titan_moe.distributed.parallel_dims import Axes, coordinates

_TERM = re.compile(r"(?:P|S\((\d+)\))\[([^\[\]]+)\]")


@dataclass(frozen=True)
class Sharding:
    """Holds what each axis of a mesh means for a tensor: parts, copies or the terms of a sum."""

    cuts: tuple[tuple[str, ...], ...] = ()
    """The axes that cut each tensor dim, outermost first; dims after the last cut one are left
    out."""
    partial: frozenset[str] = frozenset()
    """Axes over which the tensor is a sum that has not been taken."""

    def __post_init__(self) -> None:
        cuts = tuple(tuple(axes) for axes in self.cuts)
        while cuts and not cuts[-1]:
            cuts = cuts[:-1]
        object.__setattr__(self, "cuts", cuts)
        object.__setattr__(self, "partial", frozenset(self.partial))
        named = [axis for axes in cuts for axis in axes] + sorted(self.partial)
        if twice := sorted({axis for axis in named if named.count(axis) > 1}):
            raise ValueError(f"{self} names {', '.join(twice)} twice: name each axis once")

    @classmethod
    def parse(cls, text: str) -> "Sharding":
        """Parses the text form. Raises ValueError with one line for anything else."""
        if text == "R":
            return cls()
        terms = list(_TERM.finditer(text))
        if not terms or "".join(term.group() for term in terms) != text:
            raise ValueError(
                f"{text!r} is no sharding: write R, or terms such as P[tp]S(0)[ep,edp]"
            )
        found = {dim: tuple(axes.split(",")) for dim, axes in (term.groups() for term in terms)}
        if len(found) < len(terms):
            raise ValueError(f"{text!r} has two terms of one kind: join their axes in order")
        partial = frozenset(found.pop(None, ()))  # Its term names no dim.
        cuts = {int(dim): axes for dim, axes in found.items()}
        return cls(tuple(cuts.get(dim, ()) for dim in range(max(cuts, default=-1) + 1)), partial)

    def __str__(self) -> str:
        partial = f"P[{','.join(sorted(self.partial))}]" if self.partial else ""
        cuts = (f"S({dim})[{','.join(axes)}]" for dim, axes in enumerate(self.cuts) if axes)
        return partial + "".join(cuts) or "R"

    def check(self, shape: Sequence[int], axes: Axes) -> None:
        """Raises ValueError where it does not fit a tensor's shape or the mesh's axes."""
        if len(self.cuts) > len(shape):
            raise ValueError(
                f"{self} cuts dim {len(self.cuts) - 1} of a tensor of {len(shape)} dims, "
                f"{list(shape)}"
            )
        named = {axis for cut in self.cuts for axis in cut} | self.partial
        if unknown := sorted(named - set(axes)):
            raise ValueError(
                f"{self} names {', '.join(unknown)}; the mesh has the axes {', '.join(axes)}"
            )

    def box(self, rank: int, shape: Sequence[int], axes: Axes) -> Box:
        """Returns the slices of the whole tensor that a rank holds."""
        self.check(shape, axes)
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

    def placements(self, axes: Axes) -> tuple[Placement, ...]:
        """Returns the placements of a DTensor on a mesh with these axes.

        An axis that cuts before one to its left in the mesh becomes a `_StridedShard`, which is
        what fully_shard makes of a parameter that is cut already; torch keeps it in parameters,
        optimizers and checkpoints, where it drops an explicit `shard_order`.
        """
        self.check([1] * len(self.cuts), axes)
        names = list(axes)
        placements: list[Placement] = []
        for place, axis in enumerate(names):
            if axis in self.partial:
                placements.append(Partial())
                continue
            dim = next((dim for dim, cut in enumerate(self.cuts) if axis in cut), None)
            if dim is None:
                placements.append(Replicate())
                continue
            cut = self.cuts[dim]
            before = [other for other in cut[: cut.index(axis)] if names.index(other) > place]
            split_factor = prod(axes[other] for other in before)
            placements.append(
                _StridedShard(dim, split_factor=split_factor) if split_factor > 1 else Shard(dim)
            )
        return tuple(placements)

    @classmethod
    def of(cls, placements: Sequence[Placement], axes: Axes) -> "Sharding":
        """The reverse. An axis of size 1 that cuts a dim stands last there: where it stands changes
        nothing. Raises ValueError for placements that no order of axes explains, and for a
        `Partial` that is no plain sum."""
        pairs = list(zip(axes, placements, strict=True))
        cuts: dict[int, list[str]] = {}
        for axis, each in pairs:
            # Subclasses of Partial mask or take roots before they sum.
            if each.is_partial() and (type(each) is not Partial or each.reduce_op != "sum"):
                raise ValueError(
                    f"{each!r} on axis {axis} is no plain sum, and only Partial('sum') can be "
                    "planned: call torch's DTensor.redistribute to reduce it over this axis first"
                )
        partial = frozenset(axis for axis, each in pairs if each.is_partial())
        # The last axis comes first: an axis' place follows from those to its right that cut before.
        for axis, placement in reversed(pairs):
            if placement.is_replicate() or placement.is_partial():
                continue
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
        return cls(tuple(tuple(cuts.get(d, ())) for d in range(max(cuts, default=-1) + 1)), partial)
