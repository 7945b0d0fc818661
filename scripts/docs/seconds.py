"""The table of seconds by arithmetic, from a rehearsal's counts before and after.

./scripts/rehearse.sh --counts docs/results/counts_after.json --only qwen3/30B
"""

import json
from pathlib import Path
from typing import Any

from scripts.rehearsal.seconds import ASSUMED, H100, Microbatch, compared

_RESULTS = Path(__file__).parents[2] / "docs" / "results"
_FILES = {"before": _RESULTS / "counts_before.json", "now": _RESULTS / "counts_after.json"}
SHOWN = "qwen3/30B-A3B_64gpu.toml"


def table() -> str:
    """A column for each file of counts and configuration, the arithmetic, and what is assumed."""
    columns = {
        f"{_gpus(name)}, {when}": counted
        for name in configurations()
        for when, counted in counts(name).items()
    }
    heads, lines = compared(columns)
    parts = [
        f"| {' | '.join(heads)} |\n|---|{'--:|' * len(columns)}",
        *(f"| {' | '.join(line)} |" for line in lines),
    ]
    return "\n\n".join([_commits(), "\n".join(parts), _arithmetic(), _assumptions()])


def _commits() -> str:
    words = [f"*{when}* is commit {found['commit']}" for when, found in counts(SHOWN).items()]
    return f"{', '.join(words)}.".replace("*before*", "*Before*")


def counts(name: str) -> dict[str, dict[str, Any]]:
    """ "before" and "now" -> what was counted of a configuration, where it was."""
    read = {
        when: json.loads(path.read_text(encoding="utf-8"))
        for when, path in _FILES.items()
        if path.exists()
    }
    return {when: found[name] for when, found in read.items() if name in found}


def configurations() -> list[str]:
    found = json.loads(_FILES["before"].read_text(encoding="utf-8"))
    return sorted(found, key=lambda name: -found[name]["world_size"])


def _gpus(name: str) -> str:
    (counted, *_) = counts(name).values()
    return f"{counted['world_size']} GPUs"


def _arithmetic() -> str:
    """Of the first configuration, as it is now."""
    when, counted = list(counts(SHOWN).items())[-1]
    lines = [f"| {row.name} | {row.says} |" for row in Microbatch(counted).rows()]
    title = f"What was counted of a microbatch on one of 64 GPUs, {when}:"
    return "\n".join([title, "", "| row | counted |", "|---|---|", *lines])


def _assumptions() -> str:
    device = (
        f"{H100.name}: {H100.flops / 1e12:.0f} TFLOP/s in bfloat16, "
        f"{H100.float32_flops / 1e12:.0f} in float32, {H100.memory / 1e12:g} TB/s of memory, "
        f"{H100.nvlink / 1e9:.0f} GB/s over NVLink and {H100.infiniband / 1e9:.0f} between nodes, "
        "each way. What of it is reached is assumed:"
    )
    lines = [f"| {name} | {_value(each.value)} | {each.why} |" for name, each in ASSUMED.items()]
    return "\n".join([device, "", "| of | value | |", "|---|--:|---|", *lines])


def _value(value: float) -> str:
    return f"{1e6 * value:g} µs" if value < 1e-3 else f"{value:.0%}"
