"""Sections that pages of any runs share: notes, layouts, configurations, environments."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.parallel_dims import DENSE_AXES, SPARSE_AXES
from titan_moe.verify.compare.records import COMPARED, RunRecord
from titan_moe.verify.report.render import Table

ABSENT = "\N{EM DASH}"
_UNKNOWN = "unknown"
_VIEWS = {
    "dense": (DENSE_AXES, "attention, router, shared experts, embeddings, norms"),
    "sparse": (SPARSE_AXES, "routed experts"),
}
_ALL_DRAWN = 64
_DRAWN = 2
"""Boxes of each axis that are drawn of a larger world."""
# Tables and keys that change files and messages, and not what is trained.
_QUIET = ("job.", "metrics.", "profiling.", "comm.", "debug.routing_record", "debug.capture_step")


def shared_sections(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Returns what the templates of all pages are given about their runs."""
    return {
        "notes": [line for run in runs for line in _notes(run)],
        "layouts": _layouts(runs),
        "configuration": _configuration(runs),
        "environment": _environment(runs),
    }


def _notes(run: RunRecord) -> list[str]:
    """Returns lines that a reader must know before trusting the run's curves."""
    found = []
    curve, planned = run.curve, run.config.get("training", {}).get("steps")
    if planned is not None and curve.steps[-1] < planned:
        found.append(f"{run.name}: its last step is {curve.steps[-1]} of {planned}")
    for quantity in COMPARED:
        if quantity not in curve.scalars:
            found.append(f"{run.name}: no {quantity} was logged")
            continue
        broken = np.flatnonzero(~np.isfinite(curve.scalars[quantity]))
        if len(broken):
            found.append(
                f"{run.name}: {quantity} is not finite, or missing, in {len(broken)} of "
                f"{len(curve.steps)} steps, first in step {curve.steps[int(broken[0])]}"
            )
    files = {"run.json": run.facts, "config.toml": run.config}
    if missing := [file for file, content in files.items() if not content]:
        found.append(f"{run.name}: left no {' and no '.join(missing)}")
    return found


def layout_words(run: RunRecord) -> str:
    """The axes that are larger than 1."""
    sizes = run.facts.get("layout")
    if not sizes:
        return f"{_UNKNOWN} layout"
    words = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    return ", ".join(words) or "one rank"


def _configuration(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The keys that are not the same in all runs; of one run, those that are not the defaults."""
    lines = [
        f"{run.name}: the configuration is unknown, for there is no config.toml."
        for run in runs
        if not run.config
    ]
    known = [run for run in runs if run.config]
    if is_one := len(known) == 1:
        defaults = JobConfig().model_dump(mode="json", exclude_none=True)
        known.append(replace(known[0], name="default", config=defaults))
    rows = [row for row in differing_keys(known) if not is_one or row[1] != ABSENT]
    kinds = ["quiet" if row[0].startswith(_QUIET) else "" for row in rows]
    quiet = kinds.count("quiet")
    if known:
        lines.append(f"Keys that may change what is trained: {len(rows) - quiet}; others: {quiet}.")
    table = Table(["key", *(run.name for run in known)], rows, kinds=kinds) if rows else None
    return {"lines": lines, "table": table}


def differing_keys(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Rows of key and each run's value where these differ; keys that change no training last."""
    configs = [_flat(run.config) for run in runs]
    rows = [
        [key, *(config.get(key, ABSENT) for config in configs)]
        for key in sorted({key for config in configs for key in config})
        if len({config.get(key) for config in configs}) > 1
    ]
    return sorted(rows, key=lambda row: row[0].startswith(_QUIET))


def _environment(runs: Sequence[RunRecord]) -> Table:
    """Code, torch, device, data, ...; facts that are not the same in all runs are marked."""
    tables = [_flat({k: v for k, v in run.facts.items() if k != "layout"}) for run in runs]
    keys = dict.fromkeys(key for facts in tables for key in facts)
    rows = [["layout", *map(layout_words, runs)]]
    rows += [[key, *(facts.get(key, _UNKNOWN) for facts in tables)] for key in keys]
    steps = [run.curve.steps for run in runs]
    rows.append(["steps logged", *(f"{len(s)}: {s[0]} to {s[-1]}" for s in steps)])
    kinds = ["differs" if len(set(row[1:])) > 1 else "" for row in rows]
    rows.append(["folder", *(str(run.folder or _UNKNOWN) for run in runs)])
    return Table(["", *(run.name for run in runs)], rows, kinds=[*kinds, ""])


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns nested tables as a flat one: {"table.key": value in words}."""
    found: dict[str, str] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return found


def _layouts(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Every run's ranks in both views, each rank once in each; above 64 ranks the first of each
    axis. A layout that several runs share is drawn once."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(layout_words(run), []).append(run)
    found = []
    for words, alike in groups.items():
        sizes, views = alike[0].facts.get("layout") or {}, []
        for name, (axes, modules) in _VIEWS.items() if sizes else ():
            larger = [(axis, sizes[axis]) for axis in axes if sizes.get(axis, 1) > 1]
            world = prod(size for _, size in larger)
            most = world if world <= _ALL_DRAWN else _DRAWN
            views.append(
                {"name": name, "modules": modules, "axes": larger, "world": world, "most": most}
            )
        names = ", ".join(run.name for run in alike)
        found.append({"names": names, "words": words, "views": views})
    return found
