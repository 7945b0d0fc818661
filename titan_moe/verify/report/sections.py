"""What pages show of any runs: layouts, configurations, environments, values step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.parallel_dims import DENSE_AXES, SPARSE_AXES
from titan_moe.verify.compare.records import RunRecord
from titan_moe.verify.report.render import Table
from titan_moe.verify.report.words import (
    ABSENT,
    differing_keys,
    fact_rows,
    layout_of,
    layout_words,
)

VIEWS = {
    "dense": (DENSE_AXES, "attention, router, shared experts, embeddings, norms"),
    "sparse": (SPARSE_AXES, "routed experts"),
}
_ALL_DRAWN = 64
_DRAWN = 2
"""Boxes of each axis that are drawn of a larger world."""
_MOST_VALUES = 400


@dataclass(frozen=True)
class MeshNode:
    """A rank, or the boxes along one axis of the mesh."""

    rank: int | None = None
    place: str = ""
    """A rank's coordinates, in words."""
    axis: str = ""
    direction: str = ""
    """"row" of ranks; "across" or "down" of boxes."""
    inner: list["MeshNode"] = field(default_factory=list)
    left_out: str = ""
    """The largest coordinate, if not all are drawn."""


def layouts(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Every run's ranks in both views, each rank once in each; above 64 ranks the first of each
    axis. A layout that several runs share is drawn once."""
    groups: list[tuple[dict[str, int], list[RunRecord]]] = []
    for run in runs:
        same = [those for sizes, those in groups if sizes and sizes == layout_of(run)]
        if same:
            same[0].append(run)
        else:
            groups.append((layout_of(run), [run]))
    return [
        {
            "names": ", ".join(run.name for run in those),
            "words": layout_words(those[0]),
            "views": [mesh_view(name, sizes) for name in VIEWS] if sizes else [],
        }
        for sizes, those in groups
    ]


def configuration(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The keys that are not the same in all runs; of one run, those that are not the defaults."""
    known = [run for run in runs if run.config]
    lines = [
        f"{run.name}: the configuration is unknown, for there is no config.toml."
        for run in runs
        if not run.config
    ]
    if len(known) < 2:
        if not known:
            return {"lines": lines, "table": None}
        defaults = JobConfig().model_dump(mode="json", exclude_none=True)
        pair = known[0], replace(known[0], config=defaults)
        rows = [row for row in differing_keys(pair)[0] if row[1] != ABSENT]
        said = f"{len(rows)} keys of {known[0].name} are not at their defaults."
        return {"lines": [*lines, said], "table": Table(["key", "value", "default"], rows)}
    rows, num_loud = differing_keys(known)
    if not rows:
        return {"lines": [*lines, "All keys are the same."], "table": None}
    kinds = ["" if i < num_loud else "quiet" for i in range(len(rows))]
    said = f"Keys that may change what is trained: {num_loud}; others: {len(rows) - num_loud}."
    heads = ["key", *(run.name for run in known)]
    return {"lines": [*lines, said], "table": Table(heads, rows, kinds=kinds)}


def events(runs: Sequence[RunRecord]) -> Table | None:
    """What runs decided about spikes and NaN, in the order of time; None where there were none."""
    rows = [
        [
            run.name,
            str(event.get("time", ABSENT)),
            str(event["step"]),
            str(event.get("decision", ABSENT)),
            str(event.get("line", ABSENT)),
        ]
        for run in runs
        for event in run.events
    ]
    return Table(["run", "time", "step", "decision", "why"], rows, numbers=[2]) if rows else None


def environment(runs: Sequence[RunRecord]) -> Table:
    """Code, torch, device, data, ...; what is not the same in all runs is marked."""
    rows = fact_rows(runs)
    kinds = ["differs" if len(set(row[1:])) > 1 and row[0] != "folder" else "" for row in rows]
    return Table(["", *(run.name for run in runs)], rows, kinds=kinds)


def values_table(heads: Sequence[str], columns: Sequence[Sequence[str]]) -> tuple[Table, str]:
    """Numbers, one row a step (of many steps every n-th), and the table's title."""
    rows = list(zip(*columns, strict=True))
    every = -(-len(rows) // _MOST_VALUES) if rows else 1
    title = "Values step by step" + (f": every {every}th of {len(rows)}" if every > 1 else "")
    return Table(heads, rows[::every], numbers=range(len(heads))), title


def mesh_view(name: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """What is drawn of a world in one of VIEWS: its words, and its ranks as nested boxes."""
    axes, modules = VIEWS[name]
    known = [(axis, int(sizes.get(axis, 1))) for axis in axes]
    world = prod(size for _, size in known)
    most = world if world <= _ALL_DRAWN else _DRAWN
    larger = [(axis, size) for axis, size in known if size > 1]
    left_out = f"; drawn: the first {most} of each axis of {world} ranks" if most < world else ""
    return {
        "name": name,
        "modules": modules,
        "words": " x ".join(f"{axis} {size}" for axis, size in larger) or "one rank",
        "left_out": left_out,
        "node": _mesh(larger, 0, most, ""),
    }


def _mesh(axes: list[tuple[str, int]], first: int, most: int, place: str) -> MeshNode:
    """The ranks from `first` on that these axes hold, outermost axis first."""
    if not axes:
        return MeshNode(first, place.strip() or "alone")
    (axis, size), *inner = axes
    stride = prod(each for _, each in inner)
    nodes = [
        _mesh(inner, first + i * stride, most, f"{place}{axis} {i} ")
        for i in range(min(size, most))
    ]
    # Stages of a pipeline stand below each other; ranks that hold the same layers, side by side.
    direction = "row" if not inner else "down" if axis == "pp" else "across"
    left_out = str(size - 1) if size > most else ""
    return MeshNode(axis=axis, direction=direction, inner=nodes, left_out=left_out)
