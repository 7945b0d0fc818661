"""All GPU benchmarks in one call, in under 10 minutes: tables on standard output, JSON in a folder.

    python scripts/bench/gpu_all.py FOLDER
    python scripts/bench/gpu_all.py FOLDER --device cpu      # toy sizes, to see that it runs

Each part is a process with a limit of its own: one that fails or takes too long costs the others
nothing. FOLDER/gpu_all.json sums up: each part's figures, its seconds, and all goals. Tests of
tests/gpu come last, where pytest is installed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

_REPO = Path(__file__).resolve().parents[2]
# Benchmark and arguments, and how many seconds it may take on a GPU.
PARTS: dict[str, tuple[list[str], int]] = {
    "gpu_permute": (["gpu_permute"], 60),
    "gpu_moe": (["gpu_moe"], 90),
    "gpu_slice_qwen3": (["gpu_slice", "--only", "qwen3"], 140),
    "gpu_slice_deepseek_v3": (["gpu_slice", "--only", "deepseek_v3"], 140),
}
_TESTS_LIMIT = 150


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--only", metavar="PART", default="", help="parts whose name has this in it"
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: --device cpu runs the same code on toy sizes")
    folder: Path = arguments.folder.resolve()  # The parts run in the repository's root.
    folder.mkdir(parents=True, exist_ok=True)
    toy = ["--device", "cpu", "--repeats", "1"] if arguments.device == "cpu" else []
    summary: dict[str, Any] = {}
    for name, (command, limit) in PARTS.items():
        if arguments.only in name:
            file = folder / f"{name}.json"
            part, *rest = command
            started = [sys.executable, "-m", f"scripts.bench.{part}", *rest, *toy]
            summary[name] = run(name, [*started, "--json", str(file)], limit) | read(file)
    if not any(arguments.only in name for name in [*PARTS, "tests"]):
        sys.exit(f"--only {arguments.only}: choose from {', '.join(PARTS)}, tests")
    if arguments.device == "cuda" and arguments.only in "tests":
        files = ["tests/gpu/test_kernels.py", "tests/gpu/test_training.py"]
        tests = [sys.executable, "-m", "pytest", "-q", *files]
        summary["tests"] = run("tests", tests, _TESTS_LIMIT)
    whole = folder / "gpu_all.json"
    whole.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    goals = [goal for part in summary.values() for goal in part.get("goals", [])]
    missed = [goal["name"] for goal in goals if not goal["met"]]
    print(f"\n{len(goals) - len(missed)} of {len(goals)} goals met; figures: {whole}")
    failed = [name for name, part in summary.items() if part["exit code"]]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name: str, command: list[str], limit: int) -> dict[str, Any]:
    """One part; its output goes where ours goes."""
    print(f"\n=== {name} ===", flush=True)
    started = time.monotonic()
    path = os.pathsep.join(filter(None, [str(_REPO), os.environ.get("PYTHONPATH", "")]))
    try:
        code = subprocess.run(
            command, cwd=_REPO, env=os.environ | {"PYTHONPATH": path}, timeout=limit
        ).returncode
    except subprocess.TimeoutExpired:
        code = 124
        print(f"stopped after {limit} s", flush=True)
    return {"exit code": code, "seconds": round(time.monotonic() - started, 1)}


def read(file: Path) -> dict[str, Any]:
    """What a part wrote; nothing if it did not get so far."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


if __name__ == "__main__":
    main()
