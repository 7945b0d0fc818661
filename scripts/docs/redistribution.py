"""The tables of plans beside torch's own and of the time to find them, from a benchmark's figures.

python -m scripts.bench.redistribution --json docs/results/redistribution.json
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "redistribution.json"
_HEAD = (
    "| mesh | dims | torch's planner | pairs | ours is below | equal | above | mean cost, torch | "
    "ours | most saved |\n|---|--:|---|--:|--:|--:|--:|--:|--:|--:|"
)


def costs() -> str:
    """A row for each mesh and planner."""
    found = _results()
    rows = [_row(each) for each in found["comparisons"]]
    return f"By `{found['command']}`, torch {found['torch']}.\n\n" + "\n".join([_HEAD, *rows])


def times() -> str:
    """How long a plan takes to find."""
    found = _results()
    planning = found["planning"]
    return (
        f"`{found['command']}`, {found['date']}, {found['commit']}: the plans of "
        f"{planning['pairs']:,} drawn pairs of shardings (5 axes, 3 tensor dims) take "
        f"{planning['median_ms']:.1f} ms each in the median and {planning['worst_ms']:.0f} ms at "
        "worst, in CPU time of one core beside other work. A plan that was asked for before comes "
        "from a cache."
    )


def _results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def _row(each: dict[str, Any]) -> str:
    mesh = " x ".join(map(str, each["axes"]))
    equal = each["pairs"] - each["below"] - each["above"]
    return (
        f"| {mesh} | {each['num_dims']} | {each['planner']} | {each['pairs']} | "
        f"{each['below'] / each['pairs']:.0%} | {equal / each['pairs']:.0%} | {each['above']} | "
        f"{each['mean_theirs']:.2f} | {each['mean_ours']:.2f} | {each['most_saved']:g} |"
    )
