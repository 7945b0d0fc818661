"""Check layouts of more ranks than there are: every parameter's shards on all ranks by arithmetic,
and what two ranks of each, in fake worlds, really make of it.

In a fake world the model stays on the meta device, so a layout of 64 ranks costs milliseconds and
no memory.
"""

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from titan_moe.config.checks.job import check
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.distributed.mesh import Meshes
from titan_moe.distributed.parallel_dims import (
    AXES,
    DERIVED_AXES,
    parallel_dims,
)
from titan_moe.distributed.parallelize import lay_out
from titan_moe.distributed.policies import resolve_model
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.fake_rank import CPU, fake_world, known_groups
from titan_moe.simulate.models import LayoutModel, layout_models
from titan_moe.simulate.tiling import (
    PARAMETER_AXES,
    TOKEN_AXES,
    Tiling,
    group_problems,
    groups,
    members,
)
from titan_moe.verify.layouts.covering import cover_options, cover_pairs
from titan_moe.verify.layouts.layouts import DENSE_AXES, Layout, legal_layouts
from titan_moe.verify.layouts.shards import SPARSE_AXES, Box, Shards, tensor_dims

_MOST_SHOWN = 5
_LAYOUTS_PER_PROCESS = 48


@dataclass
class LayoutResult:
    """What was found of one layout."""

    layout: str
    world_size: int
    ranks: list[int]
    """Checked in a fake world."""
    num_parameters: int = 0
    """Compared on those ranks."""
    num_groups: int = 0
    """Process groups of each rank, the world's own not counted."""
    cpu_seconds: float = 0.0
    """In fake worlds."""
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems and self.num_parameters > 0

    def add(self, rank: "RankResult") -> None:
        """Take what was found on one rank."""
        self.num_parameters += rank.num_parameters
        self.cpu_seconds += rank.cpu_seconds
        self.num_groups = max(self.num_groups, rank.num_groups)
        self.problems += rank.problems


class RankResult(NamedTuple):
    """What was found on one rank of a layout."""

    num_parameters: int
    """Compared, over all families."""
    num_groups: int
    problems: list[str]
    cpu_seconds: float = 0.0


def select_layouts(
    world_sizes: Sequence[int], *, sample_size: int | None = None, seed: int = 1
) -> list[Layout]:
    """All legal power-of-two layouts, or a sample of each size, with options that cover them."""
    layouts = []
    for world_size in world_sizes:
        legal = legal_layouts(world_size)
        layouts += legal if sample_size is None else cover_pairs(legal, sample_size, seed)
    return cover_options(layouts)


def check_layouts(
    layouts: Sequence[Layout],
    *,
    num_workers: int,
    on_result: Callable[[LayoutResult], object] = lambda _: None,
) -> list[LayoutResult]:
    """Check each layout; the results are in their order.

    Args:
        num_workers: processes at a time.
        on_result: called with each result as soon as it is complete.
    """
    tasks = list(_tasks(layouts))
    results = [LayoutResult(str(layout), layout.world_size, []) for layout in layouts]
    for numbers, rank in tasks:
        for number in numbers:
            results[number].ranks.append(rank)
    tiling = Tiling()
    for result, layout in zip(results, layouts, strict=True):
        result.problems += _arithmetic_problems(tiling, layout)
    calls = [([layouts[number] for number in numbers], rank) for numbers, rank in tasks]
    pending = Counter(number for numbers, _ in tasks for number in numbers)
    for index, found in in_fresh_processes(check_ranks, calls, num_workers=num_workers):
        numbers, _ = tasks[index]
        for number, rank_result in zip(numbers, found, strict=True):
            results[number].add(rank_result)
            pending[number] -= 1
            if not pending[number]:
                on_result(results[number])
    return results


def summary(results: Sequence[LayoutResult], seconds: float) -> dict[str, Any]:
    """Counts, by world size and in all."""
    return {
        "layouts": len(results),
        "passed": sum(result.passed for result in results),
        "ranks": sum(len(result.ranks) for result in results),
        "parameters_compared": sum(result.num_parameters for result in results),
        "layouts_by_world_size": {
            size: sum(result.world_size == size for result in results)
            for size in sorted({result.world_size for result in results})
        },
        "most_groups_of_a_rank": max((result.num_groups for result in results), default=0),
        "seconds": round(seconds, 1),
        "cpu_seconds_in_fake_worlds": round(sum(result.cpu_seconds for result in results), 1),
    }


def as_json(results: Sequence[LayoutResult], seconds: float) -> dict[str, Any]:
    return {
        "summary": summary(results, seconds),
        "layouts": [asdict(result) for result in results],
    }


def _arithmetic_problems(tiling: Tiling, layout: Layout) -> list[str]:
    problems = group_problems(layout)
    for family, model in layout_models(layout).items():
        shards = Shards(layout, tensor_dims(), model.stages)
        lines = tiling.problems(shards, model.shapes())
        problems += [f"all ranks: {family}: {line}" for line in lines]
    return problems


def _tasks(layouts: Sequence[Layout]) -> Iterator[tuple[list[int], int]]:
    """Which layouts, by their numbers in the list, share a process, and the rank that it is.

    Each layout meets two ranks that differ in every coordinate; the first and the last, whose
    coordinates do not depend on the axes' order, only if there are no others.
    """
    draw = random.Random(0)
    for world_size in sorted({layout.world_size for layout in layouts}):
        numbers = [n for n, layout in enumerate(layouts) if layout.world_size == world_size]
        for first in range(0, len(numbers), _LAYOUTS_PER_PROCESS):
            chunk = numbers[first : first + _LAYOUTS_PER_PROCESS]
            rank = draw.randrange(1, world_size - 1) if world_size > 2 else 0
            yield chunk, rank
            yield chunk, world_size - 1 - rank


# --- one rank in a fake world ---------------------------------------------------------------------


def check_ranks(layouts: Sequence[Layout], rank: int) -> list[RankResult]:
    """Check the same rank of each layout; all have the same number of ranks.

    Run it in a process that has not been another rank: see `fake_world`.
    """
    assert len({layout.world_size for layout in layouts}) <= 1
    torch.set_num_threads(1)
    return [_check_rank(layout, rank) for layout in layouts]


def _check_rank(layout: Layout, rank: int) -> RankResult:
    started = time.process_time()
    try:
        with fake_world(rank, layout.world_size):
            result = _compare_with_arithmetic(layout, rank)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        result = RankResult(0, 0, [f"rank {rank}: {line}"])
    return result._replace(cpu_seconds=time.process_time() - started)


def _compare_with_arithmetic(layout: Layout, rank: int) -> RankResult:
    models = layout_models(layout)
    parallelism = next(iter(models.values())).job.parallelism
    meshes = parallel_dims(parallelism, layout.world_size).build_mesh(CPU.type)
    num_parameters, problems = 0, []
    for family, model in models.items():
        shard = _LaidOut(model, layout, meshes)
        num_parameters += len(shard.held)
        problems += [f"{family}: {line}" for line in shard.problems()]
    # Compared last, because parts of the model make groups of their own; shown first.
    problems = [*_mesh_problems(layout, meshes), *problems]
    shown = [f"rank {rank}: {line}" for line in problems[:_MOST_SHOWN]]
    if len(problems) > _MOST_SHOWN:
        shown.append(f"rank {rank}: and {len(problems) - _MOST_SHOWN} more")
    return RankResult(num_parameters, meshes.groups.num_groups, shown)


class _LaidOut:
    """What this rank holds of a model, and what it should."""

    def __init__(self, model: LayoutModel, layout: Layout, meshes: Meshes) -> None:
        self.layout, self.rank = layout, meshes.rank
        job, config = model.job, resolve_model(model.config, model.job)
        self.refusals = check(job, config, layout.world_size, num_gpus=0)
        laid_out = lay_out(job, config, meshes, CPU)
        self.held: dict[str, nn.Parameter] = {
            name: p for part in laid_out.parts for name, p in part.named_parameters()
        }
        self.partial_over_tp = laid_out.partial_over_tp
        self.shards = Shards(layout, tensor_dims(), model.stages)
        self.shapes = {
            name: shape
            for name, shape in model.shapes().items()
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
        held = tuple(local_part(parameter).shape)
        if held != (wanted := tuple(part.stop - part.start for part in box)):
            yield f"{name} has {list(held)} here, by arithmetic {list(wanted)}"
        elif 0 not in held and (slices := local_slices(parameter)) != box:
            yield f"{name} lies at {_text(slices)}, by arithmetic at {_text(box)}"

    def _is_whole_over_tp(self, name: str) -> bool:
        if self.layout.tp == 1 or ".experts." in name:
            return False
        return self.shards.tensor_dim(name) is None


def _mesh_problems(layout: Layout, meshes: Meshes) -> Iterator[str]:
    """What is wrong with this rank's coordinates and groups."""
    rank, dims = meshes.rank, meshes.dims
    shards = Shards(layout)
    for axis in dict.fromkeys((*DENSE_AXES, *SPARSE_AXES)):
        wanted = shards.coordinate(rank, axis)
        if (found := dims.coordinate(rank, axis)) != wanted:
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
    fewest = Counter(
        [tuple(range(layout.world_size)), *(ranks for _, ranks in groups(layout, rank))]
    )
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


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in box) + "]"
