"""What a rank pays to be able to say where it hangs, of a step's time.

    python -m scripts.bench.hang_watch [--ranks 2] [--layers 12] [--repeats 10] [--json FILE]

Two things are paid in a step: torch's flight recorder keeps an entry for each collective, and
titan_moe notes when a rank enters and leaves a phase, a layer and a region. Both are counted in one
step of a tiny expert-parallel model, the more of them beside the arithmetic the smaller the model.
Then each is timed alone: an entry by a collective of one number in a world of one rank, with and
without a recorder, in processes that take turns; a note by itself. The goal is that counts times
times are at most 1 % of the step.
"""

import multiprocessing
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.measure import Goal, options, print_table, take_turns, write_json
from scripts.bench.train_steps import new_training, world_of_one
from titan_moe.debug.hang.layers import mark_layers
from titan_moe.debug.hang.records import num_recorded
from titan_moe.runtime.position import POSITION
from titan_moe.testing.ranks import run_on_ranks

_RECORDER = "TORCH_FR_BUFFER_SIZE"
_ENTRIES = 2000
"""As many as comm.trace_buf_size keeps unless told otherwise."""
_CALLS = 5000
_WARM_UP = 3
_TABLES: dict[str, dict[str, Any]] = {
    "model": {"flavor": "2M"},
    "training": {"local_batch_size": 2, "seq_len": 64},
    "activation_checkpoint": {"mode": "none"},
}


def measure_step(num_layers: int, repeats: int) -> dict[str, float]:
    """On one rank: seconds of a step, and how many entries and notes it makes."""
    torch.set_num_threads(1)
    world_size = dist.get_world_size()
    tables = _TABLES | {"parallelism": {"expert_parallel_degree": world_size}}
    cpu = torch.device("cpu")
    training = new_training(tables, cpu, num_layers=num_layers, world_size=world_size)
    mark_layers(training.sharded.parts)
    took: list[float] = []
    for _ in range(_WARM_UP + repeats):
        entries, began = num_recorded(), time.time_ns()
        training.run()
        took.append((time.time_ns() - began) / 1e9)
        notes = sum(move.time_ns >= began for move in POSITION.moves())
        entries = num_recorded() - entries
    return {
        "seconds": statistics.median(took[_WARM_UP:]),
        "entries": float(entries),
        "notes": float(notes),
    }


def seconds_of_a_call(num_kept: int) -> float:
    """Of a collective in a new process, whose recorder keeps so many."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_time_calls, (num_kept,))


def _time_calls(num_kept: int) -> float:
    os.environ[_RECORDER] = str(num_kept)
    torch.set_num_threads(1)
    number = torch.zeros(1)
    took = []
    with world_of_one(torch.device("cpu")):
        for _ in range(_CALLS):
            began = time.perf_counter()
            dist.all_reduce(number)
            took.append(time.perf_counter() - began)
    assert (num_recorded() > 0) == (num_kept > 0), "the recorder is not as it was asked for"
    return statistics.median(took)


def seconds_of_a_note() -> float:
    """Of entering a layer."""
    began = time.perf_counter()
    for _ in range(_CALLS):
        POSITION.enter_layer("layer 0")
    return (time.perf_counter() - began) / _CALLS


def main() -> int:
    parser = options(__doc__, repeats=10)
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=12, help="default: %(default)s")
    arguments = parser.parse_args()
    os.environ[_RECORDER] = str(_ENTRIES)
    ranks = run_on_ranks(measure_step, arguments.ranks, arguments.layers, arguments.repeats)
    step = max(ranks, key=lambda rank: rank["entries"])
    variants = {"on": lambda: seconds_of_a_call(_ENTRIES), "off": lambda: seconds_of_a_call(0)}
    calls = take_turns(variants, arguments.repeats, clock=lambda run: run(), warm_up=0)
    entry = statistics.median(on - off for on, off in zip(calls["on"], calls["off"], strict=True))
    seconds = {"entries": entry, "notes": seconds_of_a_note()}
    rows = [
        [name, step[name], 1e6 * each, 1e3 * each * step[name]] for name, each in seconds.items()
    ]
    print_table(["", "in a step", "us each", "ms of a step"], rows)
    share = sum(row[3] for row in rows) / 1e3 / step["seconds"]
    goal = Goal(f"of a step of {1e3 * step['seconds']:.1f} ms", share, 0.01, at_most=True)
    print(goal)
    write_json(arguments.json, {"step": step, "calls": calls, "goal": goal.as_dict()})
    return int(not goal.met)


if __name__ == "__main__":
    sys.exit(main())
