"""The shard of each parameter that each rank holds, from the layout's numbers alone.

A second description of what titan_moe.distributed does with DTensors, to test it against:
no mesh, no placement, no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from titan_moe.models.tensor_plan import TENSOR_PLAN
from titan_moe.verify.layouts.layouts import DENSE_AXES, V_SCHEDULES, Layout

Box = tuple[slice, ...]
"""The place of a shard in the whole tensor."""
HIDDEN_DIM = {"w1": 1, "w3": 1, "w2": 2, "b1": 1, "b3": 1, "b2": 1, "w1_b": 1, "w3_b": 1, "w2_a": 2}
"""The dim of a stack that etp cuts: the hidden dim; for b2 [E, D] the model's. Stacks of adapters
that are not here are whole."""
SPARSE_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")
_CUT_BY_TP = {
    "colwise": {"weight": 0, "bias": 0, "adapter.b": 0},
    "colwise_norm": {"weight": 0},
    "rowwise": {"weight": 1, "adapter.a": 1},
    "vocab_rows": {"weight": 0},
    "vocab_columns": {"weight": 0, "bias": 0},
    "heads": {"weight": 0},
}


_TENSOR_DIMS = {
    f"{module}.{parameter}": dim
    for module, how in TENSOR_PLAN.items()
    for parameter, dim in _CUT_BY_TP.get(how, {}).items()
}
"""The tensor dim that tp cuts, by pattern of parameter names; what matches none is whole on every
tp rank."""


@dataclass(frozen=True)
class Shards:
    """The arithmetic of one layout.

    `stages`: the names of the modules of each pipeline stage; empty without a pipeline.
    """

    layout: Layout
    stages: Sequence[Sequence[str]] = ()

    def coordinate(self, rank: int, axis: str) -> int:
        """A rank's coordinate along an axis of either view; pp outermost, tp or etp innermost."""
        view = DENSE_AXES if axis in DENSE_AXES else SPARSE_AXES
        inner = prod(self.layout.size(each) for each in view[view.index(axis) + 1 :])
        return rank // inner % self.layout.size(axis)

    def holds(self, rank: int, name: str) -> bool:
        """Says whether a module or parameter of this name is on the rank's pipeline stages;
        multi-token prediction goes with the output layer."""
        if not self.stages:
            return True
        name = "output" if name.startswith("mtp.") else name
        held = [module for stage in self.stages_of(rank) for module in self.stages[stage]]
        return any(name == each or name.startswith(f"{each}.") for each in held)

    def stages_of(self, rank: int) -> list[int]:
        """The numbers of a rank's stages, in the order of the model."""
        pp, place = self.layout.pp, self.coordinate(rank, "pp")
        if self.layout.schedule in V_SCHEDULES:
            return [place, 2 * pp - 1 - place]
        return list(range(place, len(self.stages), pp))

    def box(self, rank: int, name: str, shape: Sequence[int]) -> Box:
        """The place of a rank's shard of a parameter, which must be on one of its stages."""
        assert self.holds(rank, name), f"{name} is on no stage of rank {rank}"
        whole = [(0, size) for size in shape]
        if ".experts." in name:
            whole[0] = _even(whole[0], self.layout.ep, self.coordinate(rank, "ep"))
            if (hidden := HIDDEN_DIM.get(name.rsplit(".", 1)[1])) is not None:
                place = self.coordinate(rank, "etp")
                whole[hidden] = _even(whole[hidden], self.layout.etp, place)
            return _chunk_one_dim(whole, self.layout.edp, self.coordinate(rank, "edp"))
        if (dim := self.tensor_dim(name)) is not None:
            whole[dim] = _even(whole[dim], self.layout.tp, self.coordinate(rank, "tp"))
        shards = self.layout.dp_shard * self.layout.cp
        place = self.coordinate(rank, "dp_shard") * self.layout.cp + self.coordinate(rank, "cp")
        return _chunk_one_dim(whole, shards, place)

    def tensor_dim(self, name: str) -> int | None:
        """The dim of a parameter, other than routed experts', that tp cuts; None if none."""
        return next((d for p, d in _TENSOR_DIMS.items() if fnmatchcase(name, p)), None)

    def problems(
        self, rank: int, held: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]]
    ) -> list[str]:
        """Returns a line for each parameter that a rank lacks, that belongs to another rank, or of
        which it has a shard of another shape.

        Args:
            held: the shape of each shard that the rank holds, by the name of its parameter.
            shapes: the shape of every parameter of the whole model.
        """
        wanted = {name for name in shapes if self.holds(rank, name)}
        lines = [f"{name} belongs to another rank" for name in sorted(held.keys() - wanted)]
        lines += [f"{name} is missing" for name in sorted(wanted - held.keys())]
        for name in sorted(held.keys() & wanted):
            sizes = [span.stop - span.start for span in self.box(rank, name, shapes[name])]
            if list(held[name]) != sizes:
                lines.append(f"{name} has {list(held[name])} here, by arithmetic {sizes}")
        return lines


def _even(span: tuple[int, int], shards: int, place: int) -> tuple[int, int]:
    first, end = span
    size, rest = divmod(end - first, shards)
    assert rest == 0, f"{end - first} is no multiple of {shards}"
    return first + place * size, first + (place + 1) * size


def _chunk_one_dim(spans: list[tuple[int, int]], shards: int, place: int) -> Box:
    """Data parallelism's cut: dim 0 into chunks of one size, of which the last may be smaller and
    further ones empty; where one would be empty, the first dim that divides, if there is any."""
    sizes = [end - first for first, end in spans]
    dim, chunk = 0, -(-sizes[0] // shards)
    if chunk * (shards - 1) >= sizes[0]:
        dim = next((d for d, size in enumerate(sizes) if size % shards == 0), 0)
        chunk = -(-sizes[dim] // shards)
    first, end = spans[dim]
    cut = (min(first + place * chunk, end), min(first + (place + 1) * chunk, end))
    return tuple(slice(*(cut if d == dim else span)) for d, span in enumerate(spans))
