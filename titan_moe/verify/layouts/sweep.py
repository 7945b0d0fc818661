"""Checks layouts of more ranks than there are: in a fake world, two ranks of each layout lay the
model out as in training, and the result is compared with arithmetic.

In a fake world the model stays on the meta device, so a layout of 64 ranks costs milliseconds and
no memory. Models are as wide as published ones; only their depth is cut.
"""

import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_moe.checks.job import check
from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.distributed.parallel_dims import AXES, DERIVED_AXES, Meshes, parallel_dims
from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.parallelize.parallelize import lay_out
from titan_moe.parallelize.policies import make_plan
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.fake_rank import CPU, fake_world
from titan_moe.verify.layouts.covering import cover_options, cover_pairs
from titan_moe.verify.layouts.layouts import (
    DENSE_AXES,
    Layout,
    apply_layout,
    depth,
    layout_tables,
    legal_layouts,
    stages,
)
from titan_moe.verify.layouts.shards import SPARSE_AXES, Shards

_SEQ_LEN = 4096
_MOST_SHOWN = 5
_LAYOUTS_PER_PROCESS = 48
_JOINED_AXES: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("dp_shard", "cp"),
    "sequence": ("cp", "tp"),
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}


class RankCheck(NamedTuple):
    """The result of one rank of a layout."""

    layout: str
    rank: int
    num_parameters: int
    """Parameters compared, over all families."""
    problems: list[str]


def select_layouts(
    world_sizes: Sequence[int], *, sample_size: int | None = None, seed: int = 1
) -> list[Layout]:
    """Returns all legal layouts, or a sample of each size, with options that cover
    them."""
    layouts = []
    for world_size in world_sizes:
        legal = legal_layouts(world_size)
        layouts += legal if sample_size is None else cover_pairs(legal, sample_size, seed)
    return cover_options(layouts)


def check_layouts(layouts: Sequence[Layout], *, num_workers: int) -> Iterator[RankCheck]:
    """Yields checks of two ranks of each layout, in `num_workers` processes at a time."""
    tasks = list(_tasks(layouts))
    for _, checks in in_fresh_processes(check_ranks, tasks, num_workers=num_workers):
        yield from checks


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
    num_parameters = 0
    try:
        with fake_world(rank, layout.world_size):
            parallelism = apply_layout(JobConfig(), layout).parallelism
            meshes = parallel_dims(parallelism, layout.world_size).build_mesh(CPU.type)
            problems = list(_mesh_problems(layout, meshes))
            for family, config in _models(layout).items():
                held, found = _check_model(family, config, layout, meshes)
                num_parameters += held
                problems += [f"{family}: {line}" for line in found]
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        problems = [f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"]
    if not num_parameters:
        problems.append("no parameter was compared")
    return RankCheck(str(layout), rank, num_parameters, problems[:_MOST_SHOWN])


def _models(layout: Layout) -> dict[str, ModelConfig]:
    """Returns DeepSeek-V3 as published, whose sizes divide by 64, and a model of sizes that tp and
    ep divide where they cut, and that hardly anything else divides.

    Of 191 rows the last rank has fewer than the others; of 3 experts a rank, data parallelism of
    four ranks or more must cut another dim; norms of 24 leave some of 32 ranks with nothing.
    """
    published, small = model_config("deepseek_v3", "671B"), model_config("qwen3", "gate")
    assert small.moe is not None
    uneven = replace(
        small,
        dim=191,
        vocab_size=192,
        max_seq_len=_SEQ_LEN,
        attention=GQAConfig(128, 64, 24, small.attention.rope, qk_norm="learned", bias=True),
        moe=replace(small.moe, num_experts=3 * layout.ep, hidden_dim=192),
    )
    models = {"deepseek_v3": replace(published, num_dense_layers=1), "qwen3": uneven}
    return {name: replace(each, num_layers=depth(layout)) for name, each in models.items()}


def _check_model(
    family: str, config: ModelConfig, layout: Layout, meshes: Meshes
) -> tuple[int, list[str]]:
    """Returns how many parameters this rank holds, and a line for each difference from
    arithmetic."""
    rows = layout_tables(layout)["training"]["local_batch_size"] * layout.data_ranks
    training = {"seq_len": _SEQ_LEN, "global_batch_size": rows}
    model = {"name": family, "flavor": "gate"}
    job = apply_layout(JobConfig(), layout, {"model": model, "training": training})
    plan = make_plan(job, config, layout.world_size)
    config = plan.config
    problems = check(job, config, layout.world_size)
    shards = Shards(layout, stages(layout))
    shapes = _shapes(config)
    laid_out = lay_out(plan, meshes)
    held = {name: p for part in laid_out.parts for name, p in part.named_parameters()}
    own = {name: local_part(parameter).shape for name, parameter in held.items()}
    problems += shards.problems(meshes.rank, own, shapes)
    for name, parameter in held.items():
        assert isinstance(parameter, DTensor)
        if tuple(parameter.shape) != shapes[name]:
            problems.append(f"{name} is {list(parameter.shape)} as a whole, not {shapes[name]}")
        if own[name].numel() and shards.holds(meshes.rank, name):
            box, slices = shards.box(meshes.rank, name, shapes[name]), local_slices(parameter)
            if slices != box:
                problems.append(f"{name} lies at {slices}, by arithmetic at {box}")
    wanted = [name for name in shapes if shards.holds(meshes.rank, name)]
    dense = [name for name in wanted if layout.tp > 1 and ".experts." not in name]
    whole = {name for name in dense if shards.tensor_dim(name) is None}
    if laid_out.partial["tp"] != whole:
        differ = sorted(laid_out.partial["tp"] ^ whole)
        problems.append(f"gradients summed over tp: {differ} differ")
    return len(held), [*problems, *_stray_groups(layout, meshes)]


@cache
def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of the whole model."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Decoder(config).named_parameters()}


def _mesh_problems(layout: Layout, meshes: Meshes) -> Iterator[str]:
    """Yields what is wrong with this rank's groups and coordinates."""
    for axis in (*AXES, *DERIVED_AXES):
        wanted = _members(layout, meshes.rank, axis)
        if (found := dist.get_process_group_ranks(meshes.group(axis))) != wanted:
            yield f"{axis} group has the ranks {found}, by arithmetic {wanted}"
        place, own = meshes.dims.coordinate(meshes.rank, axis), wanted.index(meshes.rank)
        if ((found := meshes[axis].mesh.tolist()), place) != (wanted, own):
            yield f"{axis} coordinate {place} of {found}, by arithmetic {own} of {wanted}"


def _stray_groups(layout: Layout, meshes: Meshes) -> Iterator[str]:
    """Yields this rank's groups that are of no axis, nor those of a dispatcher with two ranks of an
    ep group on a node: these two, and the ranks in the same place on the other nodes."""
    ep = _members(layout, meshes.rank, "ep")
    place = ep.index(meshes.rank)
    known = [_members(layout, meshes.rank, axis) for axis in (*AXES, *DERIVED_AXES)]
    known += [[meshes.rank], ep[place // 2 * 2 :][:2], ep[place % 2 :: 2]]
    # The first is the world.
    for group in meshes.groups.all()[1:]:
        if (ranks := dist.get_process_group_ranks(group)) not in known:
            yield f"a group has the ranks {ranks}, which by arithmetic no group has"


def _members(layout: Layout, rank: int, axis: str) -> list[int]:
    """Returns the ranks, ascending, that share all coordinates with `rank` but those of the axis;
    a joined axis varies over all axes that it joins."""
    free = _JOINED_AXES.get(axis, (axis,))
    view = DENSE_AXES if free[0] in DENSE_AXES else SPARSE_AXES
    ranks = np.arange(layout.world_size).reshape([layout.size(each) for each in view])
    own = np.unravel_index(rank, ranks.shape)
    where = [slice(None) if each in free else at for each, at in zip(view, own, strict=True)]
    return ranks[tuple(where)].ravel().tolist()
