"""Helpers of the benchmarks: options, variants that take turns, jobs, goals, tables and JSON."""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from titan_moe.runtime.device import peak_flops, refuse_unusable
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import write_whole
from titan_moe.runtime.launch import count_gpus

REPO = Path(__file__).resolve().parents[2]
TRAIN = ("-m", "titan_moe", "train")
"""Command of a job of titan_moe."""
_Name = TypeVar("_Name")
Run = Callable[[], object]

# --- options and results --------------------------------------------------------------------------


def options(doc: str | None, *, repeats: int | None) -> argparse.ArgumentParser:
    """Returns a parser with the options of all benchmarks; `repeats` None: no --repeats."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    if repeats is not None:
        counted = "counted runs of each; default: %(default)s"
        parser.add_argument("--repeats", type=int, default=repeats, help=counted)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure")
    return parser


def gpu_options(doc: str | None, *, repeats: int = 10) -> argparse.ArgumentParser:
    """Returns the parser of `options` with --seed and --device added, for `parse_gpu`."""
    parser = options(doc, repeats=repeats)
    parser.add_argument("--seed", type=int, default=0, help="seed of random inputs; default: 0")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return parser


def parse_gpu(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse and seed; ends the script with one line where there is no GPU."""
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not usable_gpus():
        sys.exit("no CUDA device here: --device cpu runs the same code on toy sizes")
    torch.manual_seed(arguments.seed)
    return arguments


def usable_gpus() -> int:
    """Returns the number of GPUs here; ends the script with one line if torch cannot use them."""
    found = count_gpus(os.environ)
    try:
        refuse_unusable(found)
    except RunError as error:
        sys.exit(f"error: {error}")
    return found


def is_toy(arguments: argparse.Namespace) -> bool:
    """Returns whether to run on small sizes, on a CPU; their figures mean nothing."""
    return arguments.device == "cpu"


def write_json(path: Path | None, figures: Mapping[str, Any], device: str = "cpu") -> None:
    """Write all figures and what they were measured on, if asked for."""
    if path is not None:
        text = json.dumps({**describe(device), **figures}, indent=1, default=str)
        write_whole(path, text + "\n")


def describe(device: str = "cpu") -> dict[str, Any]:
    """Returns the machine and the torch that figures are measured with."""
    facts: dict[str, Any] = {"torch": torch.__version__, "device": "cpu", "cores": os.cpu_count()}
    if device.startswith("cuda"):
        facts["device"] = torch.cuda.get_device_name()
        facts["peak_tflops"] = (peak_flops(torch.device("cuda", 0)) or 0) / 1e12 or "unknown"
    return facts


def print_facts(facts: Mapping[str, Any]) -> None:
    """Prints facts on one line."""
    print(", ".join(f"{name} {_text(value)}" for name, value in facts.items()), flush=True)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Prints columns as wide as they must be; texts to the left, numbers to the right."""
    if title:
        print(f"\n{title}")
    cells = [list(heads), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(heads))]
    for row in cells:
        aligned = (
            f"{cell:>{width}}" if _is_number(rows, n) else f"{cell:<{width}}"
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(aligned).rstrip(), flush=True)


def _is_number(rows: Sequence[Sequence[object]], column: int) -> bool:
    texts = [_text(row[column]) for row in rows]
    return all(text[:1] in "+-0123456789" for text in texts if text)


def _text(cell: object) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


class Goal(NamedTuple):
    """A measured number and what it should be."""

    name: str
    value: float
    limit: float
    at_most: bool = False
    """True if the value must not exceed the limit; else it must reach it."""

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Returns the goal for JSON, which has no NaN: None is a value that was not measured."""
        value = self.value if math.isfinite(self.value) else None
        return {**self._asdict(), "value": value, "met": self.met}

    def __str__(self) -> str:
        verdict = "met   " if self.met else "MISSED"
        sign = "<=" if self.at_most else ">="
        return f"{verdict} {self.name}: {self.value:.3g} {sign} {self.limit:.3g}"


def print_goals(arguments: argparse.Namespace, goals: Sequence[Goal]) -> None:
    print("\ngoals (toy sizes: they mean nothing)" if is_toy(arguments) else "\ngoals")
    for goal in goals:
        print(f"  {goal}")


def keep(arguments: argparse.Namespace, rows: Sequence[dict], goals: Sequence[Goal]) -> None:
    """Prints the last row of a GPU benchmark, and writes all figures so far, if asked for: a limit
    of time may stop the next row."""
    print_facts(rows[-1])
    found = [goal.as_dict() for goal in goals]
    figures = {"toy": is_toy(arguments), "rows": list(rows), "goals": found}
    write_json(arguments.json, figures, arguments.device)


def spread(values: Sequence[float], template: str = "{:,.0f}") -> str:
    """Returns median, minimum and maximum, as `median (min-max)`."""
    low, middle, high = (
        template.format(value) for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low}-{high})"


# --- time -----------------------------------------------------------------------------------------


def wall_seconds(run: Run) -> float:
    """Returns the seconds of one run, until the GPU has ended it too."""
    start = time.perf_counter()
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def gpu_seconds(run: Run) -> float:
    """Returns the seconds between two events on the GPU's stream; its L2 cache is cold before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # This also keeps the device busy for a moment, so that launches run ahead of it.
    torch.empty(512 * 2**20, dtype=torch.int8, device="cuda").zero_()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def take_turns(
    variants: Mapping[_Name, Run],
    repeats: int,
    *,
    clock: Callable[[Run], Any] = wall_seconds,
    warm_up: int = 1,
) -> dict[_Name, list[Any]]:
    """Returns readings of each variant, after rounds that do not count.

    The variants take turns, so that a slow spell of the machine hits all of them.
    """
    found: dict[_Name, list[Any]] = {name: [] for name in variants}
    for turn in range(warm_up + repeats):
        for name, run in variants.items():
            reading = clock(run)
            if turn >= warm_up:
                found[name].append(reading)
    return found


def medians(variants: Mapping[_Name, Run], repeats: int, device: str) -> dict[_Name, float]:
    """Returns median seconds of each variant, on a GPU by its own clock."""
    if device == "cpu":
        found = take_turns(variants, repeats)
    else:
        found = take_turns(variants, repeats, clock=gpu_seconds, warm_up=3)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


# --- jobs -----------------------------------------------------------------------------------------


def torchrun(num_ranks: int, python: str = sys.executable) -> list[str]:
    """Returns the beginning of the command of a job on this machine."""
    return [
        *(python, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={num_ranks}",
    ]


class JobFailed(SystemExit):
    """A job that ended with an error: ends the script too, unless that can go on without it."""


def run_job(
    command: Sequence[str],
    environment: Mapping[str, str] = MappingProxyType({}),
    on_line: Callable[[str, float, int], bool | None] = lambda line, seconds, pid: None,
) -> None:
    """Run a job on the CPU, in the repository's root. Raises JobFailed with its output.

    `on_line` gets each line of its output, the seconds since the launch and the job's pid, and ends
    the job by returning True.
    """
    output: list[str] = []
    start = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=REPO,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output.append(line)
                if on_line(line, time.monotonic() - start, process.pid):
                    process.terminate()
                    process.communicate()
                    return
        except BaseException:
            process.terminate()  # torchrun then ends its ranks.
            raise
    if process.returncode:
        raise JobFailed(f"{''.join(output)}\n{' '.join(command)}: failed")
