"""Where both programs' steps go, by operator: rank 0's profile, side by side.

    python -m scripts.bench.torchtitan.operators --rows 'cmp float32 FSDP 2$'

Rows are compare.py's, and so are their jobs, but for torch's profiler. An operator's time is its
own, without what it calls, on the thread that trains. "between operators" is Python, and waiting
for collectives; those themselves run on gloo's threads and are listed below. Figures are
milliseconds of a step, and shares of the program's own step: on a loaded machine only shares say
something.
"""

import argparse
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.measure import print_table
from scripts.bench.torchtitan.compare import FOLDER, Row, all_rows
from scripts.bench.torchtitan.data import write_data
from scripts.bench.torchtitan.runs import TORCHTITAN, Jobs, make_environment

_STEPS, _ACTIVE = 8, 3
PROFILING = {
    "enable_profiling": True,
    "profile_freq": _STEPS,
    "profiler_active": _ACTIVE,
    "profiler_warmup": 1,
}
_BETWEEN = "between operators"


class Profile(NamedTuple):
    """Of a program's rank 0, milliseconds of a step."""

    wall: float
    own: dict[str, float]
    calls: Counter[str]
    """Of a step, but for fractions."""
    collectives: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", metavar="REGEX", default="cmp.*2", help="regular expression")
    parser.add_argument("--out", type=Path, default=FOLDER, help="data and tokenizer")
    parser.add_argument("--venv", type=Path, help="torchtitan's environment (default: OUT/venv)")
    parser.add_argument("--most", type=int, default=24, help="operators listed; %(default)s")
    arguments = parser.parse_args()
    out, venv = arguments.out.resolve(), (arguments.venv or arguments.out / "venv").absolute()
    make_environment(venv, TORCHTITAN)
    data = write_data(out / "text")
    for row in all_rows():
        if re.search(arguments.rows, row.name):
            with tempfile.TemporaryDirectory() as folder:
                ours, theirs = profiles(row, Jobs(Path(folder), venv, *data, PROFILING), folder)
            print_profiles(row.name, ours, theirs, arguments.most)


def profiles(row: Row, jobs: Jobs, folder: str) -> tuple[Profile, Profile]:
    """titan_moe's and torchtitan's."""
    job = (row.model, row.dtype, row.layout, _STEPS)
    jobs.ours(*job)
    jobs.theirs(*job)
    traces = (
        Path(folder, program).rglob("rank*0*.json*") for program in ("titan_moe", "torchtitan")
    )
    ours, theirs = (read(next(iter(sorted(found)))) for found in traces)
    return ours, theirs


def read(path: Path) -> Profile:
    """A trace of torch.profiler."""
    import gzip

    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    return profile_of(events)


def profile_of(events: Sequence[dict[str, Any]]) -> Profile:
    """By the events of a trace with one `ProfilerStep` for each step."""
    steps = [e for e in events if e["name"].startswith("ProfilerStep")]
    thread = steps[0]["tid"]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    inside = [e for e in events if begin <= e["ts"] < end]
    operators = [e for e in inside if e["tid"] == thread and e.get("cat") == "cpu_op"]
    own: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    open_: list[dict[str, Any]] = []
    for event in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        while open_ and event["ts"] >= open_[-1]["ts"] + open_[-1]["dur"]:
            open_.pop()
        own[event["name"]] += event["dur"]
        calls[event["name"]] += 1
        if open_:
            own[open_[-1]["name"]] -= event["dur"]
        open_.append(event)
    own[_BETWEEN] = end - begin - sum(own.values())
    collectives: dict[str, float] = defaultdict(float)
    for event in inside:
        if event["name"].startswith("gloo:"):
            collectives[event["name"]] += event["dur"]
    each = 1e3 * len(steps)
    return Profile(
        (end - begin) / each,
        {name: micros / each for name, micros in own.items()},
        Counter({name: round(number / len(steps)) for name, number in calls.items()}),
        {name: micros / each for name, micros in collectives.items()},
    )


def print_profiles(name: str, ours: Profile, theirs: Profile, most: int) -> None:
    """Operators by the larger of both shares, then collectives."""
    share = {
        each: max(one.own.get(each, 0.0) / one.wall for one in (ours, theirs))
        for each in {*ours.own, *theirs.own}
    }
    rows = [
        [each, *(cell for one in (ours, theirs) for cell in _cells(one, each))]
        for each in sorted(share, key=lambda each: -share[each])[:most]
    ]
    heads = ["", "titan_moe ms", "share", "calls", "torchtitan ms", "share", "calls"]
    print_table(heads, rows, f"{name}: a step takes {ours.wall:.0f} and {theirs.wall:.0f} ms")
    both = sorted({*ours.collectives, *theirs.collectives})
    rows = [
        [each, *(f"{one.collectives.get(each, 0.0):.1f}" for one in (ours, theirs))]
        for each in both
    ]
    print_table(["on gloo's threads", "titan_moe ms", "torchtitan ms"], rows)


def _cells(profile: Profile, name: str) -> list[str]:
    own = profile.own.get(name, 0.0)
    return [f"{own:.1f}", f"{own / profile.wall:.1%}", str(profile.calls[name])]


if __name__ == "__main__":
    main()
