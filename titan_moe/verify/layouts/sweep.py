"""Checks layouts of more ranks than there are: in a fake world, two ranks of each layout lay the
model out as in training, and the result is compared with arithmetic.

In a fake world the model stays on the meta device, so a layout of 64 ranks costs milliseconds and
no memory.
"""

import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from titan_moe.config.checks.job import check
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.distributed.mesh import Meshes
from titan_moe.distributed.parallel_dims import AXES, DERIVED_AXES, parallel_dims
from titan_moe.distributed.parallelize import lay_out
from titan_moe.distributed.policies import resolve_model
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.fake_rank import CPU, fake_world, known_groups
from titan_moe.verify.layouts.covering import cover_options, cover_pairs
from titan_moe.verify.layouts.groups import PARAMETER_AXES, TOKEN_AXES, groups, members
from titan_moe.verify.layouts.layouts import DENSE_AXES, Layout, legal_layouts
from titan_moe.verify.layouts.models import LayoutModel, layout_models
from titan_moe.verify.layouts.shards import SPARSE_AXES, Shards, tensor_dims

_MOST_SHOWN = 5
_LAYOUTS_PER_PROCESS = 48


class RankCheck(NamedTuple):
    """The result of one rank of a layout."""

    layout: str
    world_size: int
    rank: int
    problems: list[str]
    num_parameters: int = 0
    """Parameters compared, over all families."""
    num_groups: int = 0
    """Process groups of the rank, the world's not counted."""


def select_layouts(
    world_sizes: Sequence[int], *, sample_size: int | None = None, seed: int = 1
) -> list[Layout]:
    """Returns all legal power-of-two layouts, or a sample of each size, with options that cover
    them."""
    layouts = []
    for world_size in world_sizes:
        legal = legal_layouts(world_size)
        layouts += legal if sample_size is None else cover_pairs(legal, sample_size, seed)
    return cover_options(layouts)


def check_layouts(
    layouts: Sequence[Layout],
    *,
    num_workers: int,
    on_result: Callable[[RankCheck], object] = lambda _: None,
) -> list[RankCheck]:
    """Checks two ranks of each layout, in `num_workers` processes at a time."""
    checks = []
    tasks = list(_tasks(layouts))
    for _, found in in_fresh_processes(check_ranks, tasks, num_workers=num_workers):
        for result in found:
            checks.append(result)
            on_result(result)
    return checks


def summary(checks: Sequence[RankCheck], seconds: float) -> dict[str, Any]:
    """Counts layouts, and those of which all ranks pass: no problem, and something compared."""
    failed = {one.layout for one in checks if one.problems or not one.num_parameters}
    layouts = {one.layout: one.world_size for one in checks}
    return {
        "layouts": len(layouts),
        "passed": len(layouts) - len(failed),
        "ranks": len(checks),
        "parameters_compared": sum(one.num_parameters for one in checks),
        "layouts_by_world_size": dict(sorted(Counter(layouts.values()).items())),
        "most_groups_of_a_rank": max((one.num_groups for one in checks), default=0),
        "seconds": round(seconds, 1),
    }


def _tasks(layouts: Sequence[Layout]) -> Iterator[tuple[list[Layout], int]]:
    """Yields layouts that share a process, and the rank that the process is.

    Each layout meets two ranks that differ in every coordinate; the first and the last, whose
    coordinates do not depend on the axes' order, only if there are no others.
    """
    draw = random.Random(0)
    for world_size in sorted({layout.world_size for layout in layouts}):
        alike = [layout for layout in layouts if layout.world_size == world_size]
        for first in range(0, len(alike), _LAYOUTS_PER_PROCESS):
            chunk = alike[first : first + _LAYOUTS_PER_PROCESS]
            rank = draw.randrange(1, world_size - 1) if world_size > 2 else 0
            yield chunk, rank
            yield chunk, world_size - 1 - rank


def check_ranks(layouts: Sequence[Layout], rank: int) -> list[RankCheck]:
    """Checks the same rank of each layout; all layouts have the same number of ranks.

    Run it in a process that has not been another rank: see `fake_world`.
    """
    torch.set_num_threads(1)
    return [_check_rank(layout, rank) for layout in layouts]


def _check_rank(layout: Layout, rank: int) -> RankCheck:
    place = str(layout), layout.world_size, rank
    try:
        with fake_world(rank, layout.world_size):
            models = layout_models(layout)
            parallelism = next(iter(models.values())).job.parallelism
            meshes = parallel_dims(parallelism, layout.world_size).build_mesh(CPU.type)
            num_parameters, problems = 0, []
            for family, model in models.items():
                laid_out = _LaidOut(model, layout, meshes)
                num_parameters += len(laid_out.held)
                problems += [f"{family}: {line}" for line in laid_out.problems()]
            # Compared last, because parts of the model make groups of their own; shown first.
            problems = [*_mesh_problems(layout, meshes), *problems]
            num_groups = meshes.groups.num_groups
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        return RankCheck(*place, [line])
    shown = problems[:_MOST_SHOWN]
    if len(problems) > _MOST_SHOWN:
        shown.append(f"and {len(problems) - _MOST_SHOWN} more")
    return RankCheck(*place, shown, num_parameters, num_groups)


class _LaidOut:
    """The parameters that this rank holds of a model, and those that it should hold."""

    def __init__(self, model: LayoutModel, layout: Layout, meshes: Meshes) -> None:
        self.layout, self.rank = layout, meshes.rank
        job, config = model.job, resolve_model(model.config, model.job)
        self.refusals = check(job, config, layout.world_size)
        laid_out = lay_out(job, config, meshes, CPU)
        self.held: dict[str, nn.Parameter] = {
            name: p for part in laid_out.parts for name, p in part.named_parameters()
        }
        self.partial_over_tp = laid_out.partial_over_tp
        self.shards = Shards(layout, tensor_dims(), model.stages)
        shapes = model.shapes().items()
        self.shapes = {name: s for name, s in shapes if self.shards.holds(self.rank, name)}

    def problems(self) -> Iterator[str]:
        """Yields one line for each difference from arithmetic."""
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
        held = tuple(local_part(parameter).shape)
        if held != (wanted := tuple(part.stop - part.start for part in box)):
            yield f"{name} has {list(held)} here, by arithmetic {list(wanted)}"
        elif 0 not in held and (slices := local_slices(parameter)) != box:
            yield f"{name} lies at {slices}, by arithmetic at {box}"

    def _is_whole_over_tp(self, name: str) -> bool:
        if self.layout.tp == 1 or ".experts." in name:
            return False
        return self.shards.tensor_dim(name) is None


def _mesh_problems(layout: Layout, meshes: Meshes) -> Iterator[str]:
    """Yields what is wrong with this rank's coordinates and groups."""
    rank, shards = meshes.rank, Shards(layout)
    for axis in dict.fromkeys((*DENSE_AXES, *SPARSE_AXES)):
        wanted = shards.coordinate(rank, axis)
        if (found := meshes.dims.coordinate(rank, axis)) != wanted:
            yield f"{axis} coordinate {found}, by arithmetic {wanted}"
    for axis in (*TOKEN_AXES, *PARAMETER_AXES):
        yield from _axis_problems(layout, rank, axis, meshes.group(axis))
    for view, axes in ((meshes.dense, DENSE_AXES), (meshes.sparse, SPARSE_AXES)):
        own = tuple(members(layout, rank, axis).index(rank) for axis in axes)
        if (view.mesh_dim_names, at := tuple(view.get_coordinate() or ())) != (axes, own):
            yield f"is at {at} of {view}, by arithmetic at {own} of {axes}"
        sizes = [len(members(layout, rank, axis)) for axis in axes]
        if view.mesh.tolist() != torch.arange(layout.world_size).view(sizes).tolist():
            yield f"{view} does not number the ranks row-major"
    made = Counter(ranks for ranks in known_groups() if len(ranks) > 1)
    world = tuple(range(layout.world_size))
    fewest = Counter([world, *(ranks for _, ranks in groups(layout, rank))])
    if made != fewest:
        yield (
            f"{made.total()} process groups with the world's, by arithmetic {fewest.total()}: "
            f"too many {sorted(made - fewest)}, too few {sorted(fewest - made)}"
        )
    # After the count, because the mesh of an axis makes its group.
    for axis in (*AXES, *DERIVED_AXES):
        place, ranks = meshes[axis].get_coordinate(), meshes[axis].mesh.tolist()
        if ranks != (others := list(members(layout, rank, axis))):
            yield f"{axis} mesh has the ranks {ranks}, by arithmetic {others}"
        elif place != (others.index(rank),):
            yield f"is at {place} of the {axis} mesh {others}"


def _axis_problems(layout: Layout, rank: int, axis: str, group: ProcessGroup) -> Iterator[str]:
    found, wanted = dist.get_process_group_ranks(group), list(members(layout, rank, axis))
    if found != wanted:
        yield f"{axis} group has the ranks {found}, by arithmetic {wanted}"
    elif dist.get_rank(group) != found.index(rank):
        yield f"is number {dist.get_rank(group)} of the {axis} group {found}"
