"""Seconds from the command to the end of the default run's first step, and where they go.

    python scripts/bench/startup.py --rounds 5

Three commands take turns:

- ./run_train.sh as a user starts it, until its first step's line is on the screen;
- the torchrun job that it starts, with a clock around titan_moe's parts (startup_rank.py);
- a torchrun job of as many ranks that do nothing but exit.

The torchrun job's parts are rank 0's and add up to its total. Torchrun's start ends with the first
line that the rank runs; torch's imports are those that FSDP2 needs whatever the training code does.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

_REPO = Path(__file__).resolve().parents[2]
_CONFIG = _REPO / "configs/debug/default.toml"
_RANKS = 2
_GOAL_SECONDS = 1.5

_TORCHRUN_START = "torchrun's start"
_REST = "everything else"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command")
    arguments = parser.parse_args()
    scripts: list[dict[str, float]] = []
    jobs: list[dict[str, float]] = []
    empty_jobs: list[dict[str, float]] = []
    for _ in tqdm(range(arguments.rounds), unit="round"):
        scripts.append(time_script())
        jobs.append(time_job())
        empty_jobs.append(time_empty_job())
    print(f"torch {metadata.version('torch')}, {_RANKS} ranks, {os.cpu_count()} cores")
    print_table("torchrun -m titan_moe train", jobs)
    print_table("./run_train.sh", scripts)
    print_table("an empty torchrun job", empty_jobs)
    print_goal(jobs, scripts)


def time_script() -> dict[str, float]:
    """Parts of ./run_train.sh: until it has checked the configuration, and from there to step 1."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        process = subprocess.Popen(
            ["./run_train.sh", "--job.dump_folder", folder],
            cwd=_REPO,
            env=os.environ | {"NGPU": str(_RANKS), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        checked = None
        for line in process.stdout:
            checked = checked or time.monotonic()
            if line.startswith("step "):
                break
        else:
            sys.exit("./run_train.sh ended before its first step")
        end = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert checked is not None
    return {"environment and configuration checked": checked - start, "torchrun": end - checked}


def time_job() -> dict[str, float]:
    """Parts of the torchrun job of the default configuration, in the order they happen in."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "startup.json"
        job = ["--job.config_file", str(_CONFIG), "--job.dump_folder", folder]
        start = time.monotonic()
        run_torchrun(str(Path(__file__).with_name("startup_rank.py")), str(file), *job)
        figures = json.loads(file.read_text(encoding="utf-8"))
    return parts_of(start, figures)


def parts_of(start: float, figures: dict) -> dict[str, float]:
    """What startup_rank.py wrote as parts that add up to the seconds since `start`."""
    parts = {_TORCHRUN_START: figures["start"] - start, **figures["seconds"]}
    parts[_REST] = figures["end"] - start - sum(parts.values())
    return parts


def time_empty_job() -> dict[str, float]:
    start = time.monotonic()
    run_torchrun("--no-python", "true")
    return {"start to exit": time.monotonic() - start}


def run_torchrun(*command: str) -> None:
    """Run a job of _RANKS ranks as run_train.sh does; ends this script when it fails."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    finished = subprocess.run(
        [*torchrun, f"--nproc-per-node={_RANKS}", *command],
        cwd=_REPO,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if finished.returncode:
        sys.exit(f"{finished.stdout}\ntorchrun {' '.join(command)}: failed")


def print_table(title: str, rounds: Sequence[dict[str, float]]) -> None:
    """Median, minimum and maximum of each part and of the total."""
    print(f"\n{title:<40}{'seconds':>8}{'min':>8}{'max':>8}")
    for part in rounds[0]:
        print_row(part, [parts[part] for parts in rounds])
    if len(rounds[0]) > 1:
        print_row("total", [sum(parts.values()) for parts in rounds])


def print_row(name: str, seconds: list[float]) -> None:
    figures = (statistics.median(seconds), min(seconds), max(seconds))
    print(f"  {name:<38}" + "".join(f"{figure:8.2f}" for figure in figures))


def print_goal(jobs: list[dict[str, float]], scripts: list[dict[str, float]]) -> None:
    """What is neither torchrun's nor torch's, of the job alone and of the whole script."""
    own = [sum(parts.values()) - not_ours(parts) for parts in jobs]
    check = [parts["environment and configuration checked"] for parts in scripts]
    print(f"\nbeyond torchrun's and torch's own start (goal: at most {_GOAL_SECONDS} s)")
    print_row("torchrun -m titan_moe train", own)
    print_row("./run_train.sh", [a + b for a, b in zip(own, check, strict=True)])


def not_ours(parts: dict[str, float]) -> float:
    """Seconds of torchrun's start and torch's imports."""
    return sum(
        seconds
        for part, seconds in parts.items()
        if part == _TORCHRUN_START or part.startswith("import torch")
    )


if __name__ == "__main__":
    main()
