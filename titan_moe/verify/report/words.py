"""The text of a report: on runs, their configurations and a verdict."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from titan_moe.verify.compare.comparison import Comparison, Verdict
from titan_moe.verify.compare.records import NORM_OF, Curve, RunRecord
from titan_moe.verify.report.data import common_steps

UNKNOWN = "unknown"
ABSENT = "\N{EM DASH}"
# Tables and keys that change what is written and said, and not what is trained.
_QUIET = ("job.", "metrics.", "profiling.", "comm.", "debug.routing_record", "debug.capture_step")


def first_not_finite(curve: Curve, quantity: str) -> int | None:
    """The first step whose value is not a finite number."""
    bad = np.flatnonzero(~np.isfinite(curve.scalars[quantity]))
    return curve.steps[int(bad[0])] if len(bad) else None


def notes(run: RunRecord) -> list[str]:
    """What a reader must know about a run before trusting its curves."""
    found = []
    curve, planned = run.curve, run.config.get("training", {}).get("steps")
    if planned is not None and curve.steps[-1] < planned:
        found.append(f"{run.name}: its last step is {curve.steps[-1]} of {planned}")
    for quantity in ("loss", "grad_norm"):
        if quantity not in curve.scalars:
            found.append(f"{run.name}: no {quantity} was logged")
        elif (step := first_not_finite(curve, quantity)) is not None:
            number = int((~np.isfinite(curve.scalars[quantity])).sum())
            found.append(
                f"{run.name}: {quantity} is not finite, or missing, in {number} of "
                f"{len(curve.steps)} steps, first in step {step}"
            )
    missing = [
        file for file, had in (("run.json", run.facts), ("config.toml", run.config)) if not had
    ]
    if missing:
        found.append(f"{run.name}: left no {' and no '.join(missing)}")
    return found


def all_notes(runs: Sequence[RunRecord]) -> list[str]:
    """The notes of all runs."""
    return [line for run in runs for line in notes(run)]


def layout_of(run: RunRecord) -> dict[str, int]:
    """Sizes of all axes of both views, from run.json; empty where it is unknown."""
    return dict(run.facts.get("layout") or {})


def layout_words(run: RunRecord) -> str:
    """The axes that are larger than 1."""
    sizes = layout_of(run)
    if not sizes:
        return f"{UNKNOWN} layout"
    words = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    return ", ".join(words) or "one rank"


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested tables as "table.key": value in words."""
    found: dict[str, str] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return found


def differing_keys(runs: Sequence[RunRecord]) -> tuple[list[list[str]], int]:
    """Rows of key and each run's value where these differ, and how many of them say what was
    trained: the others come last."""
    configs = [flat(run.config) for run in runs]
    keys = sorted({key for config in configs for key in config})
    rows = [
        [key, *(config.get(key, ABSENT) for config in configs)]
        for key in keys
        if len({config.get(key) for config in configs}) > 1
    ]
    loud = [row for row in rows if not row[0].startswith(_QUIET)]
    return loud + [row for row in rows if row[0].startswith(_QUIET)], len(loud)


def fact_rows(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Rows of fact and each run's value: code, torch, device, ..., data, and the steps logged."""
    tables = [flat({k: v for k, v in run.facts.items() if k != "layout"}) for run in runs]
    keys = list(dict.fromkeys(key for facts in tables for key in facts))
    rows = [[key, *(facts.get(key, UNKNOWN) for facts in tables)] for key in keys]
    rows.insert(0, ["layout", *map(layout_words, runs)])
    rows.append(["steps logged", *map(_steps_in_words, runs)])
    rows.append(["folder", *(str(run.folder or UNKNOWN) for run in runs)])
    return rows


def _steps_in_words(run: RunRecord) -> str:
    steps = run.curve.steps
    if len(steps) == 1:
        return f"1: step {steps[0]}"
    return f"{len(steps)}: {steps[0]} to {steps[-1]}"


def number(value: float) -> str:
    """With as many digits as float32 tells apart."""
    return f"{value:.8g}"


def detail(comparison: Comparison) -> str:
    """The reasons of the verdict, as the command prints them; or what was compared."""
    words = [f"{line[0].upper()}{line[1:]}." for line in comparison.reasons()]
    if comparison.verdict is Verdict.IDENTICAL:
        words.append(_same(comparison.baseline.curve, comparison.candidate.curve))
    return " ".join(words)


def _same(first: Curve, second: Curve) -> str:
    """What was compared where nothing differs."""
    norms = sum(key.startswith(NORM_OF) and key in second.scalars for key in first.scalars)
    loads = sum(layer in second.loads for layer in first.loads)
    known = [key for key in ("loss", "grad_norm") if key in first.scalars and key in second.scalars]
    known += [f"norms of {norms} parameters"] if norms else []
    known += [f"loads of {loads} layers"] if loads else []
    return f"Compared in {len(common_steps(first, second).steps)} steps: {', '.join(known)}."


def labelled(comparison: Comparison) -> Comparison:
    """The comparison, with "baseline" and "candidate" in the names of its runs."""
    baseline, candidate = (
        run if run.name == role else replace(run, name=f"{role} {run.name}")
        for role, run in (("baseline", comparison.baseline), ("candidate", comparison.candidate))
    )
    return replace(comparison, baseline=baseline, candidate=candidate)


def relative_words(value: float) -> str:
    """A relative difference."""
    return "0" if value == 0 else ABSENT if math.isnan(value) else f"{value:.2e}"


def distinct_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs; those that share a name are named by their folders as well, or numbered."""
    found: list[RunRecord] = []
    for i, run in enumerate(runs):
        name = run.name
        if sum(other.name == name for other in runs) > 1 and run.folder is not None:
            name = f"{run.folder.resolve().parent.name}/{name}"
        if any(other.name == name for other in found):
            name = f"{name} ({i + 1})"
        found.append(replace(run, name=name))
    return found
