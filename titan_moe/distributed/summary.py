"""The table that a run prints first: how the world and the parameters are cut, and by which
rule."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import nn

from titan_moe.config.job_config import Parallelism
from titan_moe.config.pipeline import bubble_fraction, num_microbatches, schedule_of
from titan_moe.distributed.dtensor import sharding_of
from titan_moe.distributed.parallel_dims import DENSE_AXES, DERIVED_AXES, SPARSE_AXES, Meshes

GRADIENT_RULE = "gradients: plain sums over target tokens, divided once a step by their number"


def layout_summary(
    parameters: Mapping[str, nn.Parameter], meshes: Meshes, accumulation: str = ""
) -> str:
    """Axes with this rank's groups, its parameters by how they are cut, the gradient rule, and the
    line on what the microbatches of a step share."""
    dims = meshes.dims
    lines = [f"{dims.world_size} ranks in two views, with the groups of rank {meshes.rank}:"]
    for title, axes in (("dense", DENSE_AXES), ("sparse", SPARSE_AXES), ("derived", DERIVED_AXES)):
        cells = [f"{axis}={dims.size(axis)}{_members(meshes, axis)}" for axis in axes]
        lines.append(f"  {title:8}{'  '.join(cells)}")
    lines.append("parameters, as sharded:")
    sizes: dict[str, list[int]] = defaultdict(list)
    for name, parameter in parameters.items():
        kind = "routed experts" if ".experts." in name else "dense"
        kind += "" if parameter.requires_grad else ", frozen"
        sizes[f"{kind}: {describe_sharding(parameter)}"].append(parameter.numel())
    for layout, numbers in sizes.items():
        lines.append(f"  {sum(numbers) / 1e6:10.3f} M in {len(numbers):4d} tensors  {layout}")
    lines.append(f"process groups of this rank besides the world: {meshes.groups.num_groups}")
    lines.append(GRADIENT_RULE)
    if accumulation:
        lines.append(accumulation)
    return "\n".join(lines)


def pipeline_summary(
    parallelism: Parallelism,
    stages: Sequence[Sequence[str]],
    stages_of_ranks: Sequence[Sequence[int]],
    weights: Mapping[str, float],
    rows: int,
) -> str:
    """Describes the modules and the share of the work of each stage, and the bubble to expect.

    Args:
        stages: the modules of each stage.
        stages_of_ranks: the stages that each rank of the pipeline holds.
        weights: the cost of each module.
        rows: sequences of one run of the schedule.
    """
    schedule = schedule_of(parallelism)
    microbatches = num_microbatches(parallelism, rows)
    costs = [sum(weights[name] for name in names) for names in stages]
    bubble = bubble_fraction(schedule, len(stages_of_ranks), len(stages), microbatches)
    holder = {stage: rank for rank, own in enumerate(stages_of_ranks) for stage in own}
    lines = [
        f"pipeline: {schedule.name}, {microbatches} microbatches, predicted bubble {bubble:.1%} of "
        f"the time if all stages cost the same"
    ]
    for stage, (names, cost) in enumerate(zip(stages, costs, strict=True)):
        shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        share = cost / sum(costs)
        lines.append(f"  stage {stage} on rank {holder[stage]} of pp  {share:6.1%}  {shown}")
    return "\n".join(lines)


def _members(meshes: Meshes, axis: str) -> str:
    ranks = meshes.dims.group_of(meshes.rank, axis)
    if len(ranks) == 1:
        return ""
    step = ranks[1] - ranks[0]
    return f" [{ranks[0]}..{ranks[-1]}" + (f" step {step}]" if step > 1 else "]")


def describe_sharding(parameter: nn.Parameter) -> str:
    """Returns the text of a parameter's sharding and of its mesh."""
    sharding, axes = sharding_of(parameter)
    mesh = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    return f"{sharding} on {mesh}" if axes else "whole on every rank"
