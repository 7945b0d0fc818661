"""Peak memory and time of a training step under every way to recompute, beside what must be stored.

    python -m scripts.bench.memory                                 # two minutes on a CPU
    python -m scripts.bench.memory --vocabulary 32768 --layers 2   # where logits matter
    python -m scripts.bench.memory --model qwen3 --flavor 30B-A3B --layers 4 --dtype bfloat16

One process. All ways train the same model on the same random tokens and take turns in every round.
The peak is what parameters and optimizer states hold between steps, and the most that a step
allocates beyond: on CUDA the allocator's own peak, on a CPU the running sum of every allocation and
release that torch's profiler saw. "must" is parallelize/memory.py's sum of what cannot be left out:
parameters, gradients, optimizer states and the values kept for the backward; "estimate" adds what
it expects to come and go. "whole logits" makes the logits of all tokens at once.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from scripts.bench.measure import options, print_table, take_turns, write_json
from scripts.bench.train_steps import first_gpu_or_cpu, new_training, world_of_one
from titan_moe.optim.schedules import set_lr
from titan_moe.parallelize.memory import memory

_MIB = 2**20
_COLUMNS = ("way", "peak MiB", "must", "peak/must", "estimate", "beyond", "ms/step", "time")


@dataclass
class Way:
    """One line of the table, and what was measured of it."""

    name: str
    recompute: dict[str, str]
    chunk_size: int
    held: float = 0.0
    """Bytes of parameters and optimizer states."""
    beyond: float = 0.0
    """The most bytes that a step allocates beyond."""
    must: float = 0.0
    estimate: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def peak(self) -> float:
        """Peak bytes of a step."""
        return self.held + self.beyond


def ways(chunk_size: int) -> list[Way]:
    """All lines of the table; the first is what the others' times are compared with."""
    none = {"mode": "none"}
    return [
        Way("none", none, chunk_size),
        Way("none, whole logits", none, 0),
        Way("op", {"mode": "selective", "selective_ac_option": "op"}, chunk_size),
        Way("every second layer", {"mode": "selective", "selective_ac_option": "2"}, chunk_size),
        Way("full", {"mode": "full"}, chunk_size),
    ]


def main() -> None:
    arguments = _arguments()
    device = first_gpu_or_cpu()
    lines = {way.name: way for way in ways(arguments.chunk_size)}
    with world_of_one(device):
        steps = {name: _prepared(way, arguments, device) for name, way in lines.items()}
        for name, seconds in take_turns(steps, arguments.repeats, warm_up=0).items():
            lines[name].seconds = seconds
        for name, step in steps.items():
            lines[name].beyond = _allocated_beyond(step, device)
    _show(list(lines.values()))
    figures = [asdict(way) | {"peak": way.peak} for way in lines.values()]
    write_json(arguments.json, {**vars(arguments), "ways": figures}, device.type)


def _arguments() -> argparse.Namespace:
    parser = options(__doc__, repeats=5, seeded=True)
    parser.add_argument("--model", default="qwen3")
    parser.add_argument("--flavor", default="debugmodel_moe")
    parser.add_argument("--layers", type=int, help="keep the flavor's first layers")
    parser.add_argument("--vocabulary", type=int, help="its size; left out: the flavor's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--chunk-size", type=int, default=512, help="training.loss_chunk_size")
    return parser.parse_args()


def _prepared(way: Way, arguments: argparse.Namespace, device: torch.device) -> Callable[[], Any]:
    """A step of this way, after two that made optimizer states and warmed up."""
    tables = {
        "model": {"name": arguments.model, "flavor": arguments.flavor},
        "training": {
            "local_batch_size": arguments.batch,
            "seq_len": arguments.seq_len,
            "loss_chunk_size": way.chunk_size,
            "mixed_precision_param": arguments.dtype,
        },
        "parallelism": {"data_parallel_shard_degree": 1},
        "activation_checkpoint": way.recompute,
    }
    training = new_training(
        tables,
        device,
        num_layers=arguments.layers,
        vocab_size=arguments.vocabulary,
        seed=arguments.seed,
    )
    set_lr(training.optimizer, 1.0)
    training.run()
    training.run()
    states = [x for state in training.optimizer.state.values() for x in state.values()]
    tensors: list[Tensor] = [p for _, p in training.sharded.named_parameters()]
    tensors += [x for x in states if torch.is_tensor(x)]
    way.held = float(sum(x.numel() * x.element_size() for x in tensors))
    found = memory(training.sharded.plan)
    way.must, way.estimate = found.stored + found.kept, found.total
    return training.run


def _allocated_beyond(step: Callable[[], object], device: torch.device) -> float:
    """The most bytes alive at once during a step that were not alive before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return float(torch.cuda.max_memory_allocated() - before)
    return float(most_allocated(step))


def most_allocated(step: Callable[[], object]) -> int:
    """The most bytes of a CPU's memory alive at once during a call that were not before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
    changes = [
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]"
    ]
    alive = most = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        alive += change
        most = max(most, alive)
    return most


def _show(lines: list[Way]) -> None:
    first = statistics.median(lines[0].seconds)
    rows = []
    for way in lines:
        seconds = statistics.median(way.seconds)
        cells = [way.name, *(f"{b / _MIB:,.1f}" for b in (way.peak, way.must))]
        cells += [f"{way.peak / way.must:.2f}", f"{way.estimate / _MIB:,.1f}"]
        cells += [f"{way.beyond / _MIB:,.1f}", f"{1e3 * seconds:,.0f}", f"{seconds / first:.2f}"]
        rows.append(cells)
    print_table(_COLUMNS, rows)


if __name__ == "__main__":
    main()
