"""Eager and compiled layers side by side: time of a step, and what compiling takes.

    python -m scripts.bench.compile                      # the default rows: 3 minutes on 2 cores
    python -m scripts.bench.compile --models qwen3/30B-A3B --layers 4 --seq-len 4096

One process, a GPU if there is one. Both models of a row train on the same random batch and take
turns step by step, so that a slow spell of the machine hits both; times are medians of the steps
from the 4th on. Compile time is torch's own account of all graphs, forward and backward; the first
step includes it.
"""

import argparse
import statistics
from dataclasses import asdict, dataclass

import torch

from scripts.bench.measure import options, print_table, take_turns, wall_seconds, write_json
from scripts.bench.train_steps import (
    Training,
    first_gpu_or_cpu,
    new_training,
    world_of_one,
)
from titan_moe.distributed.compile import Compiled, compiled_so_far

_WARMUP_STEPS = 3
_COLUMNS = [
    "model",
    "compute",
    "eager s",
    "compiled s",
    "faster",
    "1st step s",
    "compile s",
    "graphs",
]


@dataclass
class Row:
    """One line of the table; times in seconds."""

    model: str
    dtype: str
    eager_s: float
    compiled_s: float
    first_step_s: float
    compile: Compiled

    def cells(self) -> list[str]:
        return [
            self.model,
            self.dtype,
            f"{self.eager_s:.3f}",
            f"{self.compiled_s:.3f}",
            f"{self.eager_s / self.compiled_s:.2f}x",
            f"{self.first_step_s:.1f}",
            f"{self.compile.seconds:.1f}",
            str(self.compile.graphs),
        ]


def main() -> None:
    parser = options(__doc__, repeats=7, seeded=True)
    parser.add_argument("--models", nargs="+", default=["deepseek_v3/2M", "qwen3/debugmodel_moe"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, help="fewer layers than the flavor has")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--recompute", default="none", help="activation_checkpoint.mode")
    arguments = parser.parse_args()
    device = first_gpu_or_cpu()
    with world_of_one(device):
        rows = [
            measure(model, dtype, arguments, device)
            for model in arguments.models
            for dtype in arguments.dtypes
        ]
    print_table(_COLUMNS, [row.cells() for row in rows])
    write_json(arguments.json, {"rows": [asdict(row) for row in rows]}, device.type)


def measure(model: str, dtype: str, arguments: argparse.Namespace, device: torch.device) -> Row:
    """Train eager and compiled in turn."""
    torch._dynamo.reset()
    before = compiled_so_far()
    eager, compiled = (
        _training(model, dtype, arguments, device, enable=enable) for enable in (False, True)
    )
    first_step_s = [wall_seconds(each.run) for each in (eager, compiled)][1]
    variants = {"eager": eager.run, "compiled": compiled.run}
    seconds = take_turns(variants, arguments.repeats, warm_up=_WARMUP_STEPS - 1)
    after = compiled_so_far()
    spent = Compiled(
        after.graphs - before.graphs, after.breaks - before.breaks, after.seconds - before.seconds
    )
    median = statistics.median
    return Row(
        model, dtype, median(seconds["eager"]), median(seconds["compiled"]), first_step_s, spent
    )


def _training(
    model: str, dtype: str, arguments: argparse.Namespace, device: torch.device, *, enable: bool
) -> Training:
    name, flavor = model.split("/")
    training = {"local_batch_size": arguments.rows, "seq_len": arguments.seq_len}
    tables = {
        "model": {"name": name, "flavor": flavor},
        "training": {**training, "mixed_precision_param": dtype},
        "activation_checkpoint": {"mode": arguments.recompute},
        "compile": {"enable": enable, "backend": arguments.backend},
    }
    return new_training(tables, device, num_layers=arguments.layers, seed=arguments.seed)


if __name__ == "__main__":
    main()
