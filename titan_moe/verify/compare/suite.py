"""A regression suite: comparisons in a TOML file, run one after another, with one summary."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Section
from titan_moe.config.parse import known_keys, mistake, tomllib
from titan_moe.verify.compare.forecast import Forecast, duration
from titan_moe.verify.compare.launch import Launcher
from titan_moe.verify.compare.records import COMPARED, RunRecord, Verdict
from titan_moe.verify.compare.run_spec import RunSpec, existing, parse_overrides, split_words
from titan_moe.verify.compare.runner import Progress, Runner
from titan_moe.verify.compare.trial import Trial, trial_of
from titan_moe.verify.report.pages import layout_words, write_comparison
from titan_moe.verify.report.plots import Panel, charts, draw_curves
from titan_moe.verify.report.render import render

_ACCEPTED = {
    "identical": {Verdict.IDENTICAL},
    "inside": {verdict for verdict in Verdict if verdict.passes},
    "different": {Verdict.DIFFERENT},
    "too slow": {Verdict.TOO_SLOW},
    "too large": {Verdict.TOO_LARGE},
}
_OF_TRIAL = {"steps", "control_layouts", "seed", "max_slowdown", "max_memory_growth", "pin_routing"}
"""Keys of an entry that its trial has too."""


class Entry(Section):
    """One comparison; runs are written as for titan-moe verify losses."""

    name: str
    """The name in the summary, and of the comparison's folder."""
    expect: Literal["identical", "inside", "different", "too slow", "too large"] = "inside"
    """The gate: identical bits; those or inside the noise band; or a difference, a slow-down or a
    growth of memory that must be seen, so that the suite can fail."""
    config: Path | None = None
    """TOML file of both runs, from where the suite is started; none with a golden."""
    baseline: str = ""
    candidate: str = ""
    overrides: str = ""
    """Keys of both runs: "--table.key value ..."."""
    ranks: PositiveInt | None = None
    steps: PositiveInt | None = None
    repeats: NonNegativeInt = 24
    control_layouts: tuple[str, ...] = ()
    seed: bool = True
    """Start from a seed checkpoint; false: from weights that each run draws itself, whose checksums
    must agree."""
    max_slowdown: float | None = Field(None, gt=0, lt=1)
    """Largest growth of the time per step that passes: 0.05 is 5 %. Trains both runs 3 times."""
    max_memory_growth: float | None = Field(None, gt=0, lt=1)
    """Largest growth of the memory that passes, as a share."""
    pin_routing: bool = False
    """Compare a second time, all runs with the baseline's routes; that verdict counts."""


class Suite(Section):
    """A suite file."""

    description: str
    defaults: dict[str, Any] = Field({})
    """Keys of comparisons that leave them out."""
    comparison: list[Entry] = Field(min_length=1)


@dataclass(frozen=True)
class SuiteRow:
    """The result of one comparison."""

    name: str
    expected: str
    """The verdict that the suite expects, in words."""
    verdict: str = "failed"
    """The one that was found, in words; "failed" where there is none."""
    ok: bool = False
    detail: str = ""
    """The first difference, or the reason of a failure; may have several lines."""
    seconds: float = 0.0
    href: str = ""
    """The comparison's own page, relative to the suite's; empty if there is none."""
    runs: Sequence[RunRecord] = ()
    """The baseline and the candidate; empty where the comparison failed."""


def load_suite(path: Path, config: Path | None = None) -> Suite:
    """Read a suite; raises ConfigError with a line for everything wrong.

    Args:
        config: trained in every comparison, instead of the files that the suite names.
    """
    try:
        found = tomllib.loads(existing(path, "suite ").read_text(encoding="utf-8-sig"))
        more = {} if config is None else {"config": existing(config, "--config ")}
        with suppress(KeyError, TypeError):  # The validation names what is wrong.
            defaults, given = found.get("defaults", {}), found["comparison"]
            found["comparison"] = [defaults | each | more for each in given]
        return Suite.model_validate(found)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except ValidationError as error:
        lines = []
        for each in error.errors():
            source, place = str(path), tuple[Any, ...](each["loc"])
            if place[0] == "comparison" and len(place) > 2:
                own = given[place[1]]
                by_default = place[2] in defaults and place[2] not in own
                name = "defaults" if by_default else f"comparison {own.get('name', place[1] + 1)!r}"
                source, each["loc"] = f"{path}, {name}", place[2:]
            lines.append(mistake(each, source, known_keys(Entry)))
        raise ConfigError(list(dict.fromkeys(lines))) from None


def entry_trial(entry: Entry) -> Trial:
    """Makes an entry's trial; raises ConfigError."""
    limit = {"too slow": "max_slowdown", "too large": "max_memory_growth"}.get(entry.expect)
    if limit is not None and getattr(entry, limit) is None:
        raise ConfigError(f'{entry.name}: expect = "{entry.expect}" needs {limit}')
    common = RunSpec(
        config=None if entry.config is None else existing(entry.config, "config = "),
        ranks=entry.ranks,
        overrides=parse_overrides(split_words(entry.overrides)),
    )
    options = entry.model_dump(include=_OF_TRIAL) | {"num_control_runs": entry.repeats}
    return trial_of(entry.name, common, entry.baseline, entry.candidate, **options)


def prepare_suite(suite: Suite, folder: Path, forecast: Forecast, say: Progress) -> list[Runner]:
    """Check every comparison, and add its trainings to a forecast; trains nothing.

    Runs that several comparisons need are made once, and found again when the suite is started
    anew. Raises ConfigError with a line for everything wrong in any comparison.
    """
    runners, lines = [], []
    for number, entry in enumerate(suite.comparison, 1):
        letters = "".join(letter if letter.isalnum() else "-" for letter in entry.name.lower())
        launcher = Launcher(folder / f"{number:02d}-{letters}", shared=folder / "runs")
        try:
            runners.append(Runner(entry_trial(entry), launcher, say))
            runners[-1].prepare(forecast)
        except ConfigError as error:
            lines += [f"{entry.name}: {line}" for line in error.lines]
    if lines:
        raise ConfigError(lines)
    return runners


def run_suite(suite: Suite, runners: Sequence[Runner]) -> Iterator[SuiteRow]:
    """Run every comparison and yield its row; one that fails does not stop the others."""
    for entry, runner in zip(suite.comparison, runners, strict=True):
        started, own = time.perf_counter(), runner.launcher.folder
        row = SuiteRow(entry.name, entry.expect)
        try:
            found = runner.compare()
            write_comparison(found, own)
            row = replace(
                row,
                verdict=found.words,
                ok=found.outcome in _ACCEPTED[entry.expect],
                detail="\n".join(found.lines()[1:]),
                href=f"{own.name}/report.html",
                runs=(found.baseline, found.candidate),
            )
        except Exception as error:  # Whatever one has, the others are to be run.
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            row = replace(row, detail=f"{kind}{error}")
        yield replace(row, seconds=time.perf_counter() - started)


def suite_page(title: str, rows: Sequence[SuiteRow]) -> str:
    """Totals on top, then a row for each comparison, those that are not as expected first."""
    good = sum(row.ok for row in rows)
    took = duration(sum(row.seconds for row in rows))
    return render(
        "suite.html",
        title=title,
        kind="passed" if good == len(rows) else "failed",
        total=f"{good} of {len(rows)} comparisons are as expected; {took}.",
        rows=sorted(rows, key=lambda row: row.ok),
        charts=charts(_overlays(rows)),
    )


def _overlays(rows: Sequence[SuiteRow]) -> dict[str, Panel]:
    """Draws a baseline and all its candidates into one chart, if it has several."""
    groups: dict[Path | None, list[RunRecord]] = {}
    for row in rows:
        if row.runs:
            baseline, candidate = row.runs
            first = replace(baseline, name=f"baseline: {layout_words(baseline)}")
            group = groups.setdefault(baseline.folder, [first])
            group.append(replace(candidate, name=row.name))
    return {
        f"{key} of {', '.join(run.name for run in group)}": partial(
            draw_curves, runs=group, quantity=key
        )
        for group in groups.values()
        if len(group) > 2
        for key in COMPARED
    }
