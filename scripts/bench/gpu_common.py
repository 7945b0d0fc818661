"""What the GPU benchmarks share: devices, clocks, tables and goals."""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titan_moe.runtime.device import peak_flops

Clock = Callable[[], float]


class Goal(NamedTuple):
    """A measured number and what it should be."""

    name: str
    value: float
    limit: float
    at_most: bool = False
    """Small is good."""

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no NaN: None stands for what was not measured."""
        value = self.value if math.isfinite(self.value) else None
        return {**self._asdict(), "value": value, "met": self.met}

    def __str__(self) -> str:
        verdict = "met   " if self.met else "MISSED"
        sign = "<=" if self.at_most else ">="
        return f"{verdict} {self.name}: {self.value:.3g} {sign} {self.limit:.3g}"


def parse(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """--device, --repeats and --json; ends the script with one line where there is no GPU."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of each variant")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: --device cpu runs the same code on toy sizes")
    torch.manual_seed(0)
    return arguments


def is_toy(arguments: argparse.Namespace) -> bool:
    """Whether to run on sizes that a CPU can do; such figures mean nothing."""
    return arguments.device == "cpu"


def describe(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    facts: dict[str, Any] = {"torch": torch.__version__, "device": "cpu"}
    if device == "cuda":
        facts["device"] = torch.cuda.get_device_name()
        facts["peak_tflops"] = (peak_flops(torch.device("cuda", 0)) or 0) / 1e12 or "unknown"
    return facts


def medians(variants: Sequence[Callable[[], object]], repeats: int, device: str) -> list[float]:
    """Median seconds of each variant, which take turns, after three untimed rounds (on a GPU)."""
    laps = [timed(variant, device) for variant in variants]
    for _ in range(3 if device == "cuda" else 1):
        for lap in laps:
            lap()
    times = [[lap() for lap in laps] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def timed(variant: Callable[[], object], device: str) -> Clock:
    """Seconds of one run of `variant`: on a GPU between two events on its stream, the second-level
    cache cold before."""
    if device == "cpu":

        def lap_on_cpu() -> float:
            start = time.perf_counter()
            variant()
            return time.perf_counter() - start

        return lap_on_cpu

    def lap() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _flush_cache()
        start.record()
        variant()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return lap


def _flush_cache() -> None:
    """Also keeps the device busy for a moment, so that launches run ahead of it."""
    torch.empty(512 * 2**20, dtype=torch.int8, device="cuda").zero_()


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they must be."""
    cells = [list(heads), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(heads))]
    for row in cells:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


def _text(cell: object) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def finish(arguments: argparse.Namespace, rows: Sequence[dict], goals: Sequence[Goal]) -> None:
    """Print the goals, and write all of it if asked to."""
    print("\ngoals (toy sizes: they mean nothing)" if is_toy(arguments) else "\ngoals")
    for goal in goals:
        print(f"  {goal}")
    write(arguments, rows, goals)


def write(arguments: argparse.Namespace, rows: Sequence[dict], goals: Sequence[Goal]) -> None:
    """All figures so far, if asked for."""
    if arguments.json:
        figures = {
            **describe(arguments.device),
            "toy": is_toy(arguments),
            "rows": list(rows),
            "goals": [goal.as_dict() for goal in goals],
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
