"""How cheap plans between shardings are beside torch's own, and how long it takes to find them.

    python -m scripts.bench.redistribution --json docs/results/redistribution.json

torch plans with DTensor's planner: greedily where every dim is cut in the order of the mesh, else
by least cost (Dijkstra). Both are asked for each pair of shardings, the second one with torch's own
costs and with `UnitCosts`; neighbouring collectives are joined where torch can, over flattened
meshes that are all there. What comes of it is priced by `UnitCosts`. Nothing is carried out.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import combinations, product
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import _redistribute as torchs
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement

from scripts.bench.measure import options
from titan_moe.distributed.redistribution import plan
from titan_moe.distributed.sharding import Axes, Sharding
from titan_moe.distributed.sharding_moves import OPS, Moves, UnitCosts
from titan_moe.runtime.revision import running_code
from titan_moe.simulate.fake_rank import fake_world
from titan_moe.testing.shardings import all_shardings, drawn_sharding

PLANNERS = ("greedy", "least cost", "least UnitCosts")
ONE_AXIS = Moves(frozenset(OPS) - {"permute"}, joint=False)
SETTINGS: tuple[tuple[dict[str, int], int, int | None], ...] = (
    ({"x": 2, "y": 2}, 2, None),
    ({"x": 2, "y": 3}, 2, None),
    ({"x": 2, "y": 2, "z": 2}, 2, 500),
    ({"x": 2, "y": 2, "z": 2}, 3, 500),
)
"""Axes, tensor dims, and how many pairs are drawn; None: all."""
TIMED_AXES = {"pp": 2, "dp": 4, "cp": 2, "ep": 8, "tp": 4}
_DIM = 720
_UNIT = UnitCosts()


class TorchPlanner:
    """DTensor's planner on a mesh of a fake world."""

    def __init__(self, axes: Axes, num_dims: int) -> None:
        self._axes = axes
        self._mesh = init_device_mesh(
            "cpu", tuple(axes.values()), mesh_dim_names=tuple(axes.keys())
        )
        for number in range(2, len(axes) + 1):
            for joined in combinations(axes, number):
                self._mesh[joined]._flatten()
        shape = torch.Size([_DIM] * num_dims)
        self._meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), torch.float32)

    def costs(self, source: Sharding, target: Sharding) -> dict[str, float]:
        """Of each planner's plan, joined or "one axis at a time". Greedy ones only for shardings
        in the mesh's order, and without those that torch then refuses to carry out: they make a sum
        of parts."""
        specs = self._spec(source), self._spec(target)
        found = {}
        for name in PLANNERS:
            if name == "greedy" and not all(
                DTensorSpec.is_default_device_order(each.shard_order) for each in specs
            ):
                continue
            infos = self._plan(name, *specs)
            if any(_is_refused(info) for info in infos):
                continue
            joined = torchs._optimize_transform_infos(
                infos, self._mesh, specs[0].placements, specs[1].placements
            )
            found[name] = _price(joined)
            found[f"{name}, one axis at a time"] = _price(infos)
        return found

    def _plan(self, name: str, source: DTensorSpec, target: DTensorSpec) -> list[Any]:
        planner = torchs.DTensorRedistributePlanner(self._mesh, self._meta)
        if name == "greedy":
            return planner.generate_greedy_transform_infos(source, target)
        if name == "least UnitCosts":
            planner.cost_function = _unit_cost
        return planner.generate_graph_based_transform_infos(source, target, tuple(self._meta.shape))

    def _spec(self, sharding: Sharding) -> DTensorSpec:
        names = list(self._axes)
        placements: list[Placement] = [Replicate()] * len(names)
        for axis in sharding.partial:
            placements[names.index(axis)] = Partial()
        order = []
        for dim, cut in enumerate(sharding.cuts):
            for axis in cut:
                placements[names.index(axis)] = Shard(dim)
            if cut:
                order.append(ShardOrderEntry(dim, tuple(names.index(axis) for axis in cut)))
        return DTensorSpec(
            self._mesh, tuple(placements), tensor_meta=self._meta, shard_order=tuple(order)
        )


def _is_refused(info: Any) -> bool:
    before, after = info.src_dst_placements
    return before.is_shard() and after.is_partial()


def _price(infos: Iterable[Any]) -> float:
    return sum(_UNIT.cost(info._comm_type_key() or "slice", (), (), 0) for info in infos)


def _unit_cost(before: Any, after: Any) -> float:
    """Of a step between two of the planner's states, which differ on one axis."""
    ((one, other),) = (
        pair for pair in zip(before.placements, after.placements, strict=True) if pair[0] != pair[1]
    )
    return _price([torchs._TransformInfo(0, (one, other), ())])


def pairs_of(axes: Axes, num_dims: int, drawn: int | None) -> list[tuple[Sharding, Sharding]]:
    """All pairs of different shardings, or so many of them."""
    shardings = list(all_shardings(list(axes), num_dims))
    pairs = [(a, b) for a, b in product(shardings, shardings) if a != b]
    return pairs if drawn is None else random.Random(0).sample(pairs, drawn)


def compare(
    axes: dict[str, int], num_dims: int, pairs: Sequence[tuple[Sharding, Sharding]]
) -> dict[str, list[tuple[float, float]]]:
    """For each of torch's planners the cost of its plan and of ours, pair by pair. Is rank 0 of a
    fake world meanwhile."""
    found: dict[str, list[tuple[float, float]]] = {}
    shape = (_DIM,) * num_dims
    with fake_world(0, torch.Size(axes.values()).numel()):
        planner = TorchPlanner(axes, num_dims)
        for source, target in pairs:
            ours = {
                moves: plan(
                    source, target, axes=axes, shape=shape, dtype=torch.float32, moves=moves
                ).cost
                for moves in (Moves(), ONE_AXIS)
            }
            for name, theirs in planner.costs(source, target).items():
                moves = ONE_AXIS if name.endswith("at a time") else Moves()
                found.setdefault(name, []).append((theirs, ours[moves]))
    return found


def summary(costs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """How often ours is below, and by how much."""
    saved = [theirs - ours for theirs, ours in costs]
    return {
        "pairs": len(costs),
        "below": sum(each > 0 for each in saved),
        "above": sum(each < 0 for each in saved),
        "mean_theirs": statistics.mean(theirs for theirs, _ in costs),
        "mean_ours": statistics.mean(ours for _, ours in costs),
        "most_saved": max(saved),
    }


def planning_seconds(number: int) -> Iterator[float]:
    """CPU time to plan each of so many drawn pairs of five axes and three dims; none from the
    cache."""
    rng = random.Random(0)
    for index in range(number):
        source, target = (drawn_sharding(rng, TIMED_AXES, 3) for _ in range(2))
        start = time.process_time()
        # Another shape each time.
        plan(source, target, axes=TIMED_AXES, shape=(4096, 4096, 64 + index), dtype=torch.bfloat16)
        yield time.process_time() - start


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__, repeats=1000)
    arguments = parser.parse_args(argv)
    comparisons = []
    for axes, num_dims, drawn in SETTINGS:
        costs = compare(axes, num_dims, pairs_of(axes, num_dims, drawn))
        for name, each in sorted(costs.items()):
            row = {"axes": list(axes.values()), "num_dims": num_dims, "planner": name}
            comparisons.append({**row, **summary(each)})
            print(*comparisons[-1].values(), sep="  ", flush=True)
    seconds = sorted(planning_seconds(arguments.repeats))
    found = {
        "command": "python -m scripts.bench.redistribution",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": str(running_code().get("commit", "unknown"))[:7],
        "torch": version("torch"),
        "comparisons": comparisons,
        "planning": {
            "pairs": len(seconds),
            "median_ms": 1e3 * statistics.median(seconds),
            "worst_ms": 1e3 * seconds[-1],
        },
    }
    print(found["planning"])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
