"""Does a long run stay as it is? Memory, file handles, threads, processes and step time.

    python -m scripts.bench.soak [--steps 2000] [--ranks 2] [--even] [--json FILE]

Trains a model of one layer on the sources of Python's library. Every 20 steps it saves in the
background, keeps three checkpoints, validates, compares replicas and logs. At each logged step it
is looked at from outside, by /proc: every process's memory (what several share counts once, mapped
files do not), open files and threads; zombies and processes that have lost their parent too. Files
in /dev/shm are those of the whole machine. Times are those of metrics.jsonl; processor time
depends less on what else the machine does.

A rank's memory keeps the most that a step has needed, and with long documents and uneven routing
now and then a step needs more than all before. With --even documents and routing are alike in all
steps: then any growth is a leak.

The first fifth is warm-up. Of the rest, each quantity gets the median of the slopes between any two
of 24 blocks of samples, per 1,000 steps, and its 95 % interval (scripts/bench/slopes.py). It is
flat if the whole interval is at most its bound: 1 MiB for a process, half a file, thread or process
for the job, 2 % of a step's time and processor time, 10 % of the time of a save and a validation.
It grows if the slope is beyond the bound and the interval is above 0. Anything else is unclear:
take more steps, or an idle machine.

Exit codes: 0 if all is flat and no process is left, else 1.
"""

import json
import os
import re
import secrets
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from scripts.bench.measure import TRAIN, options, print_table, run_job, spread, write_json
from scripts.bench.processes import MARK, usage_of_job
from scripts.bench.slopes import FLAT, Slope, slope
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.revision import code_in_words, running_code

WARM_UP = 0.2
"""Share of the steps that is not judged."""
_MIB, _ONE, _STEP_TIME, _OTHER_TIME = 1.0, 0.5, 0.02, 0.1
"""Growth in 1,000 steps that counts as none: MiB, things, and shares of a time."""
_GRACE_S = 10.0
_MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 272,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
_JOB = {
    "model.name": "qwen3",
    "model.flavor": "hf",
    "model.tokenizer_path": "bytes",
    "training.dataset": "stdlib",
    "training.repeat_dataset": "true",
    "training.seq_len": 64,
    "training.local_batch_size": 4,
    "training.mixed_precision_param": "float32",
    "lr_scheduler.warmup_steps": 1,
    "activation_checkpoint.mode": "none",
    "validation.enable": "true",
    "validation.steps": 2,
    "checkpoint.enable": "true",
    "checkpoint.async_mode": "async",
    "checkpoint.keep_latest_k": 3,
}


_EVEN = {"training.dataset": "synthetic", "debug.moe_force_load_balance": "true"}


_STEP = re.compile(r"\bstep +(\d+)/")


def soak(
    folder: Path,
    *,
    steps: int,
    ranks: int,
    interval: int,
    even: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Train `steps` steps and watch; everything that was seen.

    Args:
        interval: steps from one save, validation, comparison of replicas and logged step to the
            next.
    """
    every = ("checkpoint.interval", "validation.freq", "metrics.replica_check_freq")
    keys = {
        **_JOB,
        **(_EVEN if even else {}),
        **dict.fromkeys((*every, "metrics.log_freq"), interval),
        "model.hf_assets_path": folder,
        "parallelism.expert_parallel_degree": ranks,
        "training.steps": steps,
        "job.dump_folder": folder,
    }
    mark, code = secrets.token_hex(8), running_code()
    command = [sys.executable, *TRAIN, "--ranks", str(ranks)]
    command += [f"--{key}={value}" for key, value in keys.items()]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_MODEL))
    samples: list[dict[str, Any]] = []

    def watch(line: str, seconds: float, pid: int) -> None:
        if match := _STEP.search(line):
            usage = {part: list(each) for part, each in usage_of_job(mark).items()}
            sample = {"seconds": seconds, "step": int(match[1]), "usage": usage}
            sample["files"] = sum(len(names) for _, _, names in os.walk(folder))
            sample["shm"], sample["load"] = len(os.listdir("/dev/shm")), os.getloadavg()[0]
            samples.append(sample)

    run_job(command, {MARK: mark, **environment}, watch)
    deadline = time.monotonic() + _GRACE_S
    while (left := usage_of_job(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return {
        "code": code,
        "steps": steps,
        "ranks": ranks,
        "interval": interval,
        "even": even,
        "samples": samples,
        "lines": read_json_lines(folder / "metrics.jsonl"),
        "left": sorted(left),
    }


class Series(NamedTuple):
    """A quantity over a run."""

    name: str
    unit: str
    bound: float
    """Growth in 1,000 steps that counts as none."""
    steps: list[float]
    values: list[float]


def judge(record: Mapping[str, Any]) -> list[Slope]:
    """Returns a slope for each quantity that `soak` has recorded, after the warm-up."""
    found = []
    for name, unit, bound, steps, values in all_series(record):
        first = bisect_left(steps, WARM_UP * record["steps"])
        found.append(slope(name, unit, bound, steps[first:], values[first:]))
    return found


def all_series(record: Mapping[str, Any]) -> list[Series]:
    """Returns all quantities that are judged and drawn."""
    seen = [sample for sample in record["samples"] if sample["step"] < record["steps"]]
    steps = [float(sample["step"]) for sample in seen]
    parts = sorted(set.intersection(*(set(sample["usage"]) for sample in seen[len(seen) // 2 :])))
    memory = [
        Series(f"memory, {part}", "MiB", _MIB, steps, [_memory(sample, part) for sample in seen])
        for part in parts
    ]
    counts = [
        Series(name, "", _ONE, steps, [float(count(sample)) for sample in seen])
        for name, count in _COUNTS.items()
    ]
    processor = [_processor_time(seen, part) for part in parts if part.startswith("rank")]
    return [*memory, *counts, *processor, *_times(record)]


def _processor_time(samples: Sequence[Mapping[str, Any]], part: str) -> Series:
    """Returns the processor time of a step and its share of saves and validations. The load of the
    machine does not enter it."""
    steps = np.array([float(sample["step"]) for sample in samples if part in sample["usage"]])
    spent = [sample["usage"][part][3] for sample in samples if part in sample["usage"]]
    ms = 1e3 * np.diff(spent) / np.diff(steps)
    bound = _STEP_TIME * float(np.median(ms))
    return Series(f"processor, {part}", "ms", bound, steps[1:].tolist(), ms.tolist())


def _times(record: Mapping[str, Any]) -> Iterator[Series]:
    lines = record["lines"][1:]  # The first step is logged too, alone.
    steps = [float(line["step"]) for line in lines]
    for name, phase, number, share in (
        ("a step", "step", record["interval"], _STEP_TIME),
        ("a save, as a step waits for it", "checkpoint", 1, _OTHER_TIME),
        ("a validation", "validation", 1, _OTHER_TIME),
    ):
        ms = [1e3 * line.get(f"time/{phase}", 0.0) / number for line in lines]
        yield Series(name, "ms", share * statistics.median(ms), steps, ms)


def _memory(sample: Mapping[str, Any], part: str) -> float:
    return sample["usage"].get(part, [0.0])[0]


def _sum_of(field: int) -> Callable[[Mapping[str, Any]], float]:
    return lambda sample: sum(usage[field] for usage in sample["usage"].values())


_COUNTS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "open files": _sum_of(1),
    "threads": _sum_of(2),
    "processes": _sum_of(4),
    "files of the run": lambda sample: sample["files"],
    "files in /dev/shm": lambda sample: sample["shm"],
}


def main() -> int:
    parser = options(__doc__, repeats=None)
    parser.add_argument("--steps", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--even", action="store_true", help="nothing varies with the data")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chosen = {name: getattr(arguments, name) for name in ("steps", "ranks", "even")}
        record = soak(Path(folder), interval=20, **chosen)
    rows = judge(record)
    write_json(arguments.json, {**record, "rows": [row._asdict() for row in rows]})
    print(code_in_words(record["code"]))
    loads = [sample["load"] for sample in record["samples"]]
    minutes = record["samples"][-1]["seconds"] / 60
    print(f"{minutes:.1f} minutes, load {spread(loads, '{:.1f}')}")
    heads = ["", "unit", "first", "last", "in 1,000 steps", "from", "to", "bound", ""]
    print_table(heads, [[*row, row.verdict] for row in rows])
    print(f"left over: {', '.join(record['left']) or 'no process'}")
    return int(bool(record["left"]) or any(row.verdict != FLAT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
