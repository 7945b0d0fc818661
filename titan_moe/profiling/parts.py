"""Lays the kernels of a profiled step beside the parts that the planner estimated for it.

A collective belongs to the axis that its group is of, by the name that torch's profiler notes with
it; what it waits for, such as a pipeline's bubble, counts too.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_moe.metrics.jsonl import PREDICTED, read_json_lines
from titan_moe.planner.step_time import REGIONS

_OF_AXES = {"pp": "stages", "cp": "context", "tp": "tensor", "ep": "exchange", "etp": "exchange"}
_ROUTED = ("route", "dispatch", "experts", "combine")
_KERNELS = {
    "attention": "flash|fmha|attention|sdpa",
    "experts": "group",
    "products": "gemm|gemv|nvjet|cutlass|cublas|matmul|triton_tem",
    "rows": "(copy|add)_rows",
}
"""Names of kernels, by part; the first that is found counts."""


def part_of(name: str, axes: str, region: str) -> str:
    """Returns the planner's part for a kernel of this name that a region launched. `axes`: of a
    collective's group, joined by "+"; "" if they are not known."""
    if region in ("grad_norm", "optimizer"):
        return "optimizer"
    if "nccl" in name.lower():
        parts = [_OF_AXES[axis] for axis in axes.split("+") if axis in _OF_AXES]
        routed = region in _ROUTED or ("SendRecv" in name and region != "attention")
        choices = parts or ["parameters", "exchange"]
        return max(choices, key=lambda part: (part == "exchange") == routed)
    if region == "loss":
        return "output"
    for part, pattern in _KERNELS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return "experts" if (part, region) == ("products", "experts") else part
    rest = {"fsdp": "parameters", "dispatch": "rows", "combine": "rows"}
    return rest.get(region, "elementwise")


def predicted(trace: Path) -> dict[str, float]:
    """Returns the milliseconds by part that the run of a trace expected of its step; {} if its
    metrics.jsonl names none."""
    files = (folder / "metrics.jsonl" for folder in trace.resolve().parents)
    lines = next((read_json_lines(file) for file in files if file.is_file()), [])
    named = [line for line in lines if any(key.startswith(PREDICTED) for key in line)]
    if not named:
        return {}
    parts = {part: 1e3 * named[-1][PREDICTED + part] for part in REGIONS}
    parts["stages"] += parts["bubble"]
    return parts | {"bubble": 0.0}


def beside(facts: Mapping[str, Any]) -> list[str]:
    """Returns a table of measured and predicted milliseconds, and a line that names the largest
    gap; nothing without a prediction."""
    if not (expected := facts.get("predicted_parts")):
        return []
    rows = [(part, ms, expected[part]) for part, ms in facts["measured_parts"].items()]
    part, ours, theirs = max(rows, key=lambda row: row[1] - row[2])
    share = 100 * sum(expected.values()) / facts["step_ms"]
    line = f"{share:.0f} % of this layout's bound; largest gap: {part} (measured {ours:,.1f} ms, "
    return [
        f"{'part':<22}{'measured':>11}{'predicted':>11}",
        *(f"{row[0]:<22}{row[1]:>11.1f}{row[2]:>11.1f}" for row in rows if any(row[1:])),
        f"{line}predicted {theirs:,.1f} ms)",
    ]
