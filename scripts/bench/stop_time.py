"""From the signal that asks a run to stop until its last process has ended.

    python -m scripts.bench.stop_time [--ranks 2] [--repeats 10] [--seed 0] [--json FILE]

The small model of configs/debug/default.toml trains and saves every 20 steps. At a random instant
after step 21 its launcher gets SIGTERM. The run ends its step, waits for a save that is under way,
saves, and ends. Runs that save in the step and in the background take turns. Beside the whole stand
the run's median step, and the longest that a step before the signal waited for a save.
"""

import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from scripts.bench.measure import TRAIN, options, print_table, run_job, spread, write_json
from titan_moe.checkpoint.storage import saved_steps
from titan_moe.metrics.jsonl import read_json_lines

_MODES = ("disabled", "async")
_INTERVAL, _FIRST, _WITHIN_S = 20, 21, 5.0
"""The step that the signal follows, and the most seconds after it."""
_KEYS = {
    "training.steps": 100_000,
    "checkpoint.enable": "true",
    "checkpoint.interval": _INTERVAL,
    "checkpoint.keep_latest_k": 2,
    "metrics.log_freq": 1,
}


def stop_once(ranks: int, mode: str, delay: float) -> dict[str, float]:
    """Seconds from the signal to the end, of a median step, and of the longest wait for a save.
    Raises AssertionError unless the last step is saved."""
    signalled = 0.0

    def on_line(line: str, seconds: float, pid: int) -> bool:
        nonlocal signalled
        if not re.search(rf"step +{_FIRST}/", line):
            return False
        time.sleep(delay)
        signalled = time.monotonic()
        return True

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = {**_KEYS, "checkpoint.async_mode": mode, "job.dump_folder": folder}
        config = ["--config", "configs/debug/default.toml", "--ranks", str(ranks)]
        options_ = [f"--{key}={value}" for key, value in keys.items()]
        run_job([sys.executable, *TRAIN, *config, *options_], on_line=on_line)
        took = time.monotonic() - signalled
        lines = read_json_lines(folder / "metrics.jsonl")
        assert signalled and saved_steps(folder / "checkpoint")[-1] == lines[-1]["step"]
    return {
        "stop": took,
        "step": statistics.median(line["time/step"] for line in lines),
        "save": max(line.get("time/checkpoint", 0.0) for line in lines),
    }


def main() -> None:
    parser = options(__doc__, repeats=10, seeded=True)
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in _MODES}
    for _ in range(arguments.repeats):
        for mode in _MODES:
            found[mode].append(stop_once(arguments.ranks, mode, draw.uniform(0, _WITHIN_S)))
    heads = {
        "stop": "from signal to end, s",
        "step": "a step, s",
        "save": "longest wait for a save, s",
    }
    rows = [
        [mode, *(spread([each[key] for each in runs], "{:.2f}") for key in heads)]
        for mode, runs in found.items()
    ]
    print_table(["checkpoint.async_mode", *heads.values()], rows)
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
