"""Layouts of more ranks than there are: every parameter's shards on all ranks by arithmetic, and
what two ranks really make of it."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from titan_moe.simulate.fake_world import Finding, check_ranks
from titan_moe.simulate.models import subjects
from titan_moe.simulate.tiling import Tiling, group_problems
from titan_moe.testing.process_pool import in_fresh_processes
from titan_moe.verify.layouts.covering import cover_options, cover_pairs
from titan_moe.verify.layouts.layouts import Layout, legal_layouts
from titan_moe.verify.layouts.shards import Shards, tensor_dims

_LAYOUTS_PER_PROCESS = 48


@dataclass
class Outcome:
    """What is known of one layout."""

    layout: str
    world_size: int
    ranks: list[int]
    """Looked at in a fake world."""
    num_parameters: int = 0
    """Compared on those ranks."""
    num_groups: int = 0
    """Process groups of each rank, the world's own not counted."""
    cpu_seconds: float = 0.0
    """In fake worlds."""
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems


def chosen(
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
    seen: Callable[[Outcome], object] = lambda _: None,
) -> list[Outcome]:
    """Judge each layout, in this order.

    Args:
        num_workers: processes at a time.
        seen: called with each outcome as soon as it is complete.
    """
    tasks = list(_tasks(layouts))
    outcomes = [Outcome(str(layout), layout.world_size, []) for layout in layouts]
    for places, rank in tasks:
        for place in places:
            outcomes[place].ranks.append(rank)
    tiling = Tiling()
    for outcome, layout in zip(outcomes, layouts, strict=True):
        outcome.problems += _by_arithmetic(tiling, layout)
    calls = [([layouts[place] for place in places], rank) for places, rank in tasks]
    pending = Counter(place for places, _ in tasks for place in places)
    for index, findings in in_fresh_processes(check_ranks, calls, num_workers=num_workers):
        places, _ = tasks[index]
        for place, finding in zip(places, findings, strict=True):
            _add(outcomes[place], finding)
            pending[place] -= 1
            if not pending[place]:
                seen(outcomes[place])
    return outcomes


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Counts, by world size and in all."""
    return {
        "layouts": len(outcomes),
        "passed": sum(outcome.passed for outcome in outcomes),
        "ranks": sum(len(outcome.ranks) for outcome in outcomes),
        "parameters_compared": sum(outcome.num_parameters for outcome in outcomes),
        "layouts_by_world_size": {
            size: sum(outcome.world_size == size for outcome in outcomes)
            for size in sorted({outcome.world_size for outcome in outcomes})
        },
        "most_groups_of_a_rank": max((outcome.num_groups for outcome in outcomes), default=0),
        "seconds": round(seconds, 1),
        "cpu_seconds_in_fake_worlds": round(sum(o.cpu_seconds for o in outcomes), 1),
    }


def as_json(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    return {
        "summary": summary(outcomes, seconds),
        "layouts": [asdict(outcome) for outcome in outcomes],
    }


def _by_arithmetic(tiling: Tiling, layout: Layout) -> list[str]:
    problems = group_problems(layout)
    for family, subject in subjects(layout).items():
        shards = Shards(layout, tensor_dims(), subject.stages)
        lines = tiling.problems(shards, subject.shapes())
        problems += [f"all ranks: {family}: {line}" for line in lines]
    return problems


def _tasks(layouts: Sequence[Layout]) -> Iterator[tuple[list[int], int]]:
    """Which layouts, by their places in the list, share a process, and the rank that it plays.

    Each layout meets two ranks that differ in every coordinate; the first and the last, whose
    coordinates tell nothing of the axes' order, only if there are no others.
    """
    draw = random.Random(0)
    for world_size in sorted({layout.world_size for layout in layouts}):
        places = [n for n, layout in enumerate(layouts) if layout.world_size == world_size]
        for first in range(0, len(places), _LAYOUTS_PER_PROCESS):
            chunk = places[first : first + _LAYOUTS_PER_PROCESS]
            rank = draw.randrange(1, world_size - 1) if world_size > 2 else 0
            yield chunk, rank
            yield chunk, world_size - 1 - rank


def _add(outcome: Outcome, finding: Finding) -> None:
    outcome.num_parameters += finding.num_parameters
    outcome.cpu_seconds += finding.cpu_seconds
    outcome.num_groups = max(outcome.num_groups, finding.num_groups)
    outcome.problems += finding.problems
