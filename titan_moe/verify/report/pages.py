"""The pages of a comparison and of runs: self-contained HTML, and the figures of a comparison."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import flat_keys
from titan_moe.profiling.parts import beside
from titan_moe.verify.compare.pinned_routes import FLIP_HEADS, flip_rows
from titan_moe.verify.compare.records import (
    COMPARED,
    GRADIENT_OF,
    LOAD_OF,
    RunRecord,
    Verdict,
    moved_share,
    relative_difference,
)
from titan_moe.verify.compare.verdict import Comparison
from titan_moe.verify.report import plots
from titan_moe.verify.report.plan import draw_steps
from titan_moe.verify.report.plots import Panel, charts
from titan_moe.verify.report.render import Table, render

ABSENT = "\N{EM DASH}"
_UNKNOWN = "unknown"
# Tables and keys that change files and messages, and not what is trained.
_QUIET = ("job.", "metrics.", "profiling.", "comm.", "debug.routing_record", "debug.capture_step")
_DRAWN = (*COMPARED, "mtp_loss", "validation_loss", "lr", "tokens_per_second")
# Not those that follow from others, or differ from machine to machine.
_COMPARED = _DRAWN[:4]


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes report.html and comparison.json into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    html, figures = folder / "report.html", folder / "comparison.json"
    html.write_text(comparison_page(comparison), encoding="utf-8")
    figures.write_text(json.dumps(comparison.as_json(), indent=1), encoding="utf-8")
    return [html, figures]


def comparison_page(comparison: Comparison) -> str:
    """Verdict, curves, expert load, norms, configuration, environment, noise band."""
    pair = [
        run if run.name == role else replace(run, name=f"{role} {run.name}")
        for role, run in (("baseline", comparison.baseline), ("candidate", comparison.candidate))
    ]
    flips, (first, second) = comparison.flips, (run.scalars for run in pair)
    curves = partial(plots.draw_curves, runs=pair, band=comparison.band, first=comparison.first)
    panels: dict[str, Panel] = {}
    for key in COMPARED:
        panels[f"{key}, both runs"] = partial(curves, quantity=key)
        if not np.array_equal(first[key], second[key], equal_nan=True):
            differ = partial(plots.draw_difference, quantity=key, comparison=comparison)
            panels[f"{key}, difference on a log scale"] = differ
    others = [key for key in _DRAWN[2:] if key in first and key in second]
    runs = "; ".join(
        f"{run.name} ({layout_words(run)}, steps {run.steps[0]} to {run.steps[-1]})" for run in pair
    )
    return render(
        "comparison.html",
        title=comparison.title,
        comparison=comparison,
        detail=_detail,
        runs=f"Runs: {runs}.",
        flips=Table(FLIP_HEADS, flip_rows(flips)) if flips else None,
        flip_charts=charts({"flips": partial(plots.draw_flips, flips=flips)} if flips else {}),
        charts=charts(panels),
        more=charts({key: partial(curves, quantity=key) for key in others}),
        load=charts(plots.load_panels([plots.load_of(pair[1]), plots.load_difference(*pair)])),
        quantities=deviations(comparison),
        **shared_sections(pair),
    )


def runs_page(title: str, runs: Sequence[RunRecord]) -> str:
    """Curves, expert load, configurations and environments of the runs; nothing is compared."""
    panels: dict[str, Panel] = {
        key: partial(plots.draw_curves, runs=runs, quantity=key)
        for key in _DRAWN
        if any(key in run.scalars for run in runs)
    }
    profiled = [run for run in runs if run.profile.get("predicted_parts")]
    steps = [
        (f"{run.name}, {kind}", run.profile[f"{kind}_parts"])
        for run in profiled
        for kind in ("measured", "predicted")
    ]
    bars = partial(draw_steps, steps=steps, title="milliseconds of a profiled step")
    return render(
        "runs.html",
        title=title,
        last=[_last(run) for run in runs],
        charts=charts(panels),
        events=[(run.name, event) for run in runs for event in run.events],
        parts_chart=charts({"parts of a step": bars} if steps else {}),
        beside=[(run.name, "\n".join(beside(run.profile))) for run in profiled],
        load=charts(plots.load_panels([plots.load_of(run) for run in runs])),
        **shared_sections(runs),
    )


def _detail(comparison: Comparison) -> str:
    """The reasons of the verdict, as the command prints them; or what was compared."""
    words = [f"{line[0].upper()}{line[1:]}." for line in comparison.reasons()]
    if comparison.verdict is Verdict.IDENTICAL:
        first, second = comparison.baseline, comparison.candidate
        loads = sum(layer in second.loads for layer in first.loads)
        known = [*COMPARED, *([f"loads of {loads} layers"] if loads else [])]
        words.append(f"Compared in {len(first.steps)} steps: {', '.join(known)}.")
    return " ".join(words)


def _last(run: RunRecord) -> str:
    """The latest step and its metrics."""
    known = [f"step {run.steps[-1]}"]
    for key in ("loss", "grad_norm", "validation_loss"):
        at = np.flatnonzero(np.isfinite(run.scalars.get(key, [])))
        if len(at):
            value = f"{key.replace('_', ' ')} {run.scalars[key][at[-1]]:.5g}"
            late = at[-1] == len(run.steps) - 1
            known.append(value if late else f"{value} in step {run.steps[at[-1]]}")
    return f"{run.name} ({layout_words(run)}): {', '.join(known)}"


# --- sections -------------------------------------------------------------------------------------


def shared_sections(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Returns what the templates of all pages are given about their runs."""
    return {
        "notes": [line for run in runs for line in _notes(run)],
        "configuration": _configuration(runs),
        "environment": _environment(runs),
    }


def _notes(run: RunRecord) -> Iterator[str]:
    """Yields lines that a reader must know before trusting the run's curves."""
    planned = run.config["training"]["steps"]
    if run.steps[-1] < planned:
        yield f"{run.name}: its last step is {run.steps[-1]} of {planned}"
    for quantity in COMPARED:
        broken = np.flatnonzero(~np.isfinite(run.scalars[quantity]))
        if len(broken):
            yield (
                f"{run.name}: {quantity} is not finite, or missing, in {len(broken)} of "
                f"{len(run.steps)} steps, first in step {run.steps[int(broken[0])]}"
            )


def layout_words(run: RunRecord) -> str:
    """The axes that are larger than 1."""
    words = [f"{axis}={size}" for axis, size in run.facts["layout"].items() if size > 1]
    return ", ".join(words) or "one rank"


def _configuration(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The keys that are not the same in all runs; of one run, those that are not the defaults."""
    if is_one := len(runs) == 1:
        defaults = JobConfig().model_dump(mode="json", exclude_none=True)
        runs = [*runs, replace(runs[0], name="default", config=defaults)]
    rows = [row for row in differing_keys(runs) if not is_one or row[1] != ABSENT]
    kinds = ["quiet" if row[0].startswith(_QUIET) else "" for row in rows]
    quiet = kinds.count("quiet")
    line = f"Keys that may change what is trained: {len(rows) - quiet}; others: {quiet}."
    table = Table(["key", *(run.name for run in runs)], rows, kinds=kinds) if rows else None
    return {"line": line, "table": table}


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
    steps = [run.steps for run in runs]
    rows.append(["steps logged", *(f"{len(s)}: {s[0]} to {s[-1]}" for s in steps)])
    kinds = ["differs" if len(set(row[1:])) > 1 else "" for row in rows]
    rows.append(["folder", *(str(run.folder or _UNKNOWN) for run in runs)])
    return Table(["", *(run.name for run in runs)], rows, kinds=[*kinds, ""])


def _flat(tables: Mapping[str, Any]) -> dict[str, str]:
    """Returns nested tables as a flat one: {"table.key": value in words}."""
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in flat_keys(tables).items()
    }


class Deviation(NamedTuple):
    """The distance of the candidate's quantity at its worst step."""

    quantity: str
    step: int
    baseline: float
    candidate: float
    """NaN for loads, which are many numbers."""
    relative: float
    """|candidate - baseline| / |baseline|; for a load, the share of rows at other experts."""
    reach: float
    """Distance from the band's middle in half widths of the band, each step alone; above 1 is
    outside. NaN without a band."""
    steps_outside: int


def deviations(comparison: Comparison) -> list[Deviation]:
    """Every quantity that both runs have, the one furthest out first."""
    first, second = comparison.baseline, comparison.candidate
    reaches = {} if comparison.band is None else comparison.band.reaches(second)
    nothing_S = np.full(len(first.steps), np.nan)
    pairs = {
        key: (ours_S, second.scalars[key], relative_difference(ours_S, second.scalars[key]))
        for key, ours_S in first.scalars.items()
        if (key in _COMPARED or key.startswith(GRADIENT_OF)) and key in second.scalars
    }
    for layer, ours_SE in first.loads.items():
        if layer in second.loads:
            moved_S = moved_share(ours_SE, second.loads[layer])
            pairs[LOAD_OF + layer] = nothing_S, nothing_S, moved_S
    found = []
    for key, numbers in pairs.items():
        reach_S = reaches.get(key, nothing_S)
        # The step that is furthest out of the band, or, without one, differs most.
        furthest_S = reach_S if key in reaches else numbers[-1]
        at = int(np.nan_to_num(furthest_S, nan=-1.0).argmax())
        ours, theirs, relative, reach = (float(each_S[at]) for each_S in (*numbers, reach_S))
        outside = int((reach_S > 1).sum())
        if outside or not key.startswith(GRADIENT_OF):  # There are thousands.
            found.append(Deviation(key, first.steps[at], ours, theirs, relative, reach, outside))
    return sorted(found, key=lambda one: tuple(-np.nan_to_num([one.reach, one.relative])))
