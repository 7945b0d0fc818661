"""One rank of a world that has no other ranks: its meshes, groups and shards, really made, against
arithmetic.

Torch's fake process groups exchange nothing, and the model stays on the meta device, so a layout of
64 ranks costs milliseconds and no memory.
"""

import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_moe.config.checks.job import check
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.distributed.mesh import Meshes, build_meshes
from titan_moe.distributed.parallel_dims import parallel_dims
from titan_moe.distributed.parallelize import lay_out, resolve_model
from titan_moe.simulate.models import Subject, subjects
from titan_moe.simulate.tiling import PARAMETER_AXES, TOKEN_AXES, groups, members
from titan_moe.verify.gradients.worker import tensor_dims
from titan_moe.verify.layouts.layouts import DENSE_AXES, Layout
from titan_moe.verify.layouts.shards import SPARSE_AXES, Box, Shards

# As distributed names them: dp_shard and cp are one.
_MESH_AXES = ("pp", "dp_replicate", "fsdp", "tp")
_MOST_SHOWN = 5
_CPU = torch.device("cpu")


class Finding(NamedTuple):
    """What one rank of one layout is found to have."""

    num_parameters: int
    """Compared, over all families."""
    num_groups: int
    problems: list[str]
    cpu_seconds: float = 0.0


def check_ranks(layouts: Sequence[Layout], rank: int) -> list[Finding]:
    """Look at the same rank of each layout; all have the same number of ranks.

    Wants a process that no other rank was looked at in: torch keeps what it has learnt of a mesh,
    and takes one for another of the same ranks. Then coordinates agree at least; the rest is
    cleared after every layout.
    """
    assert len({layout.world_size for layout in layouts}) <= 1
    torch.set_num_threads(1)
    findings = []
    for layout in layouts:
        started = time.process_time()
        found = _in_fake_world(layout, rank)
        findings.append(found._replace(cpu_seconds=time.process_time() - started))
    return findings


def _in_fake_world(layout: Layout, rank: int) -> Finding:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        return _check(layout, rank)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        return Finding(0, 0, [f"rank {rank}: {line}"])
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


def _check(layout: Layout, rank: int) -> Finding:
    families = subjects(layout)
    parallelism = next(iter(families.values())).job.parallelism
    meshes = build_meshes(parallel_dims(parallelism, layout.world_size), _CPU.type)
    num_parameters, problems = 0, []
    for family, subject in families.items():
        parts = _Parts(subject, layout, meshes)
        num_parameters += len(parts.held)
        problems += [f"{family}: {line}" for line in parts.problems()]
    # Looked at last, because parts of the model ask for groups of their own; shown first.
    problems = [*_group_problems(layout, meshes), *problems]
    shown = [f"rank {rank}: {line}" for line in problems[:_MOST_SHOWN]]
    if len(problems) > _MOST_SHOWN:
        shown.append(f"rank {rank}: and {len(problems) - _MOST_SHOWN} more")
    return Finding(num_parameters, meshes.groups.num_groups, shown)


class _Parts:
    """What this rank holds of a model, and what it should."""

    def __init__(self, subject: Subject, layout: Layout, meshes: Meshes) -> None:
        self.layout, self.rank, self.subject = layout, meshes.rank, subject
        job, config = subject.job, resolve_model(subject.config, subject.job)
        self.refusals = check(job, config, layout.world_size, num_gpus=0)
        built = lay_out(job, config, meshes, _CPU)
        self.held: dict[str, nn.Parameter] = {
            name: parameter for part in built.parts for name, parameter in part.named_parameters()
        }
        self._known_slices: dict[tuple, Box] = {}
        self.partial_over_tp = built.partial_over_tp
        self.shards = Shards(layout, tensor_dims(), subject.stages)
        self.shapes = {
            name: shape
            for name, shape in subject.shapes().items()
            if self.shards.holds(self.rank, name)
        }

    def problems(self) -> Iterator[str]:
        """One line for each difference from arithmetic."""
        yield from self.refusals
        if missing := self.shapes.keys() - self.held.keys():
            yield f"{len(missing)} parameters are missing, such as {min(missing)}"
        if others := self.held.keys() - self.shapes.keys():
            yield f"{len(others)} parameters are not its own, such as {min(others)}"
        for name in sorted(self.held.keys() & self.shapes.keys()):
            yield from self._parameter_problems(name)
        whole = {name for name in self.shapes if self._is_whole_over_tp(name)}
        if self.partial_over_tp != whole:
            yield f"gradients summed over tp: {sorted(self.partial_over_tp ^ whole)} differ"
        for mesh in {id(p.device_mesh): p.device_mesh for p in self.held.values()}.values():  # type: ignore[attr-defined]
            for axis in mesh.mesh_dim_names:
                yield from _axis_problems(self.layout, self.rank, axis, mesh.get_group(axis))

    def _parameter_problems(self, name: str) -> Iterator[str]:
        parameter, shape = self.held[name], self.shapes[name]
        box = self.shards.box(self.rank, name, shape)
        assert isinstance(parameter, DTensor)
        if tuple(parameter.shape) != shape:
            yield f"{name} is {list(parameter.shape)} as a whole, not {list(shape)}"
        ours, theirs = tuple(local_part(parameter).shape), _shape(box)
        if ours != theirs:
            yield f"{name} has {list(ours)} here, by arithmetic {list(theirs)}"
        elif 0 not in ours and (slices := self._slices(parameter)) != box:
            yield f"{name} lies at {_text(slices)}, by arithmetic at {_text(box)}"

    def _slices(self, parameter: DTensor) -> Box:
        """`local_slices`, which is slow for large strided shards, once for those that are alike."""
        key = id(parameter.device_mesh), parameter.shape, parameter.placements
        if key not in self._known_slices:
            self._known_slices[key] = local_slices(parameter)
        return self._known_slices[key]

    def _is_whole_over_tp(self, name: str) -> bool:
        if self.layout.tp == 1 or ".experts." in name:
            return False
        return self.shards.tensor_dim(name) is None


def _group_problems(layout: Layout, meshes: Meshes) -> Iterator[str]:
    """What is wrong with this rank's coordinates and groups."""
    rank, dims = meshes.rank, meshes.dims
    shards = Shards(layout)
    for axis in dict.fromkeys((*DENSE_AXES, *SPARSE_AXES)):
        place = shards.coordinate(rank, axis)
        if (ours := dims.coordinate(rank, axis)) != place:
            yield f"{axis} coordinate {ours}, by arithmetic {place}"
    for axis in (*TOKEN_AXES, *PARAMETER_AXES):
        yield from _axis_problems(layout, rank, axis, meshes.group(axis))
    for view, axes in ((meshes.dense, _MESH_AXES), (meshes.sparse, SPARSE_AXES)):
        own = tuple(members(layout, rank, axis).index(rank) for axis in axes)
        if (view.mesh_dim_names, at := tuple(view.get_coordinate() or ())) != (axes, own):
            yield f"stands at {at} of {view}, by arithmetic at {own} of {axes}"
    made = Counter(
        tuple(sorted(ranks))
        for ranks in dist.distributed_c10d._world.pg_group_ranks.values()
        if len(ranks) > 1
    )
    fewest = Counter(
        [tuple(range(layout.world_size)), *(ranks for _, ranks in groups(layout, rank))]
    )
    if made != fewest:
        yield (
            f"{made.total()} process groups with the world's, by arithmetic {fewest.total()}: "
            f"too many {sorted(made - fewest)}, too few {sorted(fewest - made)}"
        )


def _axis_problems(layout: Layout, rank: int, axis: str, group: ProcessGroup) -> Iterator[str]:
    ours, theirs = dist.get_process_group_ranks(group), list(members(layout, rank, axis))
    if ours != theirs:
        yield f"{axis} group has the ranks {ours}, by arithmetic {theirs}"
    elif dist.get_rank(group) != ours.index(rank):
        yield f"is number {dist.get_rank(group)} of the {axis} group {ours}"


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in box) + "]"
