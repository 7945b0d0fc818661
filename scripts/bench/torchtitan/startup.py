"""Seconds from the command to the end of the default run's first step, and where they go.

    python -m scripts.bench.torchtitan.startup --repeats 5

Three commands take turns:

- ./run_train.sh as a user starts it, until its first step's line is on the screen;
- the torchrun job that it starts, with a clock around titan_moe's parts (startup_rank.py);
- a torchrun job of as many ranks that do nothing but exit.

The torchrun job's parts are rank 0's and add up to its total. Torchrun's start ends with the first
line that the rank runs; torch's imports are those that FSDP2 needs whatever the training code does.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from scripts.bench.measure import (
    REPO,
    describe,
    options,
    print_facts,
    print_table,
    run_job,
    torchrun,
    write_json,
)

_CONFIG = REPO / "configs/debug/default.toml"
_RANKS = 2
_GOAL_SECONDS = 1.5

_TORCHRUN_START = "torchrun's start"
_REST = "everything else"
_CHECKED = "environment and configuration checked"
_JOB, _SCRIPT = "torchrun -m titan_moe train", "./run_train.sh"
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def main() -> None:
    arguments = options(__doc__, repeats=5).parse_args()
    commands: dict[str, Callable[[], dict[str, float]]] = {
        _JOB: time_job,
        _SCRIPT: time_script,
        "an empty torchrun job": time_empty_job,
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in tqdm(range(arguments.repeats), unit="round"):
        for name, command in commands.items():
            found[name].append(command())
    print_facts(describe() | {"ranks": _RANKS})
    for name, rounds in found.items():
        print_seconds(name, rounds)
    print_goal(found[_JOB], found[_SCRIPT])
    write_json(arguments.json, {"seconds": found})


def time_script() -> dict[str, float]:
    """Parts of ./run_train.sh: until it has checked the configuration, and from there to step 1."""
    at: dict[str, float] = {}

    def read(line: str, seconds: float, pid: int) -> bool:
        if "torchrun" in line:  # The command that it starts.
            at.setdefault("checked", seconds)
        if line.startswith("step "):
            at["step"] = seconds
        return "step" in at

    with tempfile.TemporaryDirectory() as folder:
        command = ["./run_train.sh", "--job.dump_folder", folder]
        run_job(command, {"NGPU": str(_RANKS)}, read)
    if "step" not in at:
        sys.exit("./run_train.sh ended before its first step")
    return {_CHECKED: at["checked"], "torchrun": at["step"] - at["checked"]}


def time_job() -> dict[str, float]:
    """Parts of the torchrun job of the default configuration, in the order they happen in."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "startup.json"
        job = ["--job.config_file", str(_CONFIG), "--job.dump_folder", folder]
        module = ["-m", "scripts.bench.torchtitan.startup_rank"]
        start = time.monotonic()
        run_job([*torchrun(_RANKS), *module, str(file), *job], _ONE_THREAD)
        figures = json.loads(file.read_text(encoding="utf-8"))
    return parts_of(start, figures)


def parts_of(start: float, figures: dict) -> dict[str, float]:
    """What startup_rank.py wrote as parts that add up to the seconds since `start`."""
    parts = {_TORCHRUN_START: figures["start"] - start, **figures["seconds"]}
    parts[_REST] = figures["end"] - start - sum(parts.values())
    return parts


def time_empty_job() -> dict[str, float]:
    start = time.monotonic()
    run_job([*torchrun(_RANKS), "--no-python", "true"], _ONE_THREAD)
    return {"start to exit": time.monotonic() - start}


def print_seconds(title: str, rounds: Sequence[dict[str, float]]) -> None:
    """Median, minimum and maximum of each part and of the total."""
    parts = {part: [each[part] for each in rounds] for part in rounds[0]}
    if len(parts) > 1:
        parts["total"] = [sum(each.values()) for each in rounds]
    rows = [[part, *_figures(seconds)] for part, seconds in parts.items()]
    print_table(["", "seconds", "min", "max"], rows, title)


def _figures(seconds: Sequence[float]) -> list[str]:
    return [f"{each:.2f}" for each in (statistics.median(seconds), min(seconds), max(seconds))]


def print_goal(jobs: list[dict[str, float]], scripts: list[dict[str, float]]) -> None:
    """What is neither torchrun's nor torch's, of the job alone and of the whole script."""
    own = [sum(parts.values()) - not_ours(parts) for parts in jobs]
    both = [seconds + parts[_CHECKED] for seconds, parts in zip(own, scripts, strict=True)]
    rows = [[_JOB, *_figures(own)], [_SCRIPT, *_figures(both)]]
    title = f"beyond torchrun's and torch's own start (goal: at most {_GOAL_SECONDS} s)"
    print_table(["", "seconds", "min", "max"], rows, title)


def not_ours(parts: dict[str, float]) -> float:
    """Seconds of torchrun's start and torch's imports."""
    return sum(
        seconds
        for part, seconds in parts.items()
        if part == _TORCHRUN_START or part.startswith("import torch")
    )


if __name__ == "__main__":
    main()
