"""What a training step costs beyond forward and backward: time, operations, all-reduces.

    python -m scripts.bench.loop_overhead --ranks 2 --layers 12 --json loop_overhead.json

A tiny model of many layers, so that what is paid by tensor and by layer shows. Forward and backward
alone, and each kind of step, are taken in turn, round after round; times are medians over rounds,
the slowest rank's. Operations are those that reach torch's dispatcher, views left out: on a GPU
about one launch each. Beside them the optimizer's update alone, the same by torch.optim.AdamW on
the same DTensors, and by Muon.
"""

import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.bench.measure import Run, options, print_table, take_turns, write_json
from scripts.bench.train_steps import Training, new_training
from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.testing.ranks import run_on_ranks
from titan_moe.train_step import local_batch

ALONE = "forward, backward"
KINDS: dict[str, dict[str, Any]] = {
    "not logged": {"logged": False},
    "logged": {},
    "logged, all norms": {"parameter_norms": True},
}
_VIEWS = ("view", "detach", "select", "slice", "unbind", "split")
_WARM_UP = 2
TABLES: dict[str, dict[str, Any]] = {
    "model": {"flavor": "2M"},
    "training": {"local_batch_size": 2, "seq_len": 64},
    "activation_checkpoint": {"mode": "none"},
}


class Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher, but for views; all-reduces apart."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.all_reduces = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not any(word in func.name() for word in _VIEWS)
        self.all_reduces += func.name() == "c10d::allreduce_"
        return func(*args, **(kwargs or {}))


def measure(num_layers: int, repeats: int, seed: int) -> dict[str, Any]:
    """On one rank: seconds and counts of each kind of step, and seconds of each update."""
    torch.set_num_threads(1)
    cpu, world_size = torch.device("cpu"), dist.get_world_size()
    training = new_training(TABLES, cpu, num_layers=num_layers, world_size=world_size, seed=seed)
    runs: dict[str, Run] = {ALONE: partial(forward_backward, training, cpu)}
    runs |= {kind: partial(training.step, [training.batch], **how) for kind, how in KINDS.items()}

    def prepare() -> None:
        training.optimizer.zero_grad()
        dist.barrier()

    counts = {}
    for name, run in runs.items():
        prepare()
        with Operations() as operations:
            run()
        counts[name] = (operations.number, operations.all_reduces)
    seconds = take_turns(runs, repeats, warm_up=_WARM_UP, before=prepare)
    return {
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "counts": counts,
        "updates": updates(training.sharded, repeats),
        "parameters": len(list(training.sharded.named_parameters())),
        "moe_layers": len(training.sharded.all_moe_layers()),
    }


def forward_backward(training: Training, device: torch.device) -> None:
    """What a step does for its one batch before anything is reduced."""
    training.sharded.execution.train(local_batch(training.batch, training.sharded, device))


def updates(sharded: ShardedModel, repeats: int) -> dict[str, float]:
    """Seconds of one update of the same parameters, by optimizer, in turn."""
    parameters = [parameter for _, parameter in sharded.named_parameters()]
    keys = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
    optimizers = {"torch.optim.AdamW": torch.optim.AdamW(parameters, **keys)}  # type: ignore[arg-type]
    for name in ("AdamW", "Muon"):
        job = JobConfig.model_validate({**TABLES, "optimizer": {"name": name}})
        optimizers[name] = build_optimizer(job.optimizer, sharded.named_parameters())  # type: ignore[assignment]

    def make_gradients() -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        dist.barrier()

    steps: dict[str, Run] = {name: each.step for name, each in optimizers.items()}
    spent = take_turns(steps, repeats, warm_up=_WARM_UP, before=make_gradients)
    return {name: statistics.median(each) for name, each in spent.items()}


def slowest(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One rank's record with all ranks' largest times."""
    found = dict(ranks[0])
    for table in ("seconds", "updates"):
        found[table] = {name: max(rank[table][name] for rank in ranks) for name in found[table]}
    return found


def rows(found: dict[str, Any]) -> list[list[object]]:
    """Of each kind of step: its milliseconds, then what it has beyond forward and backward."""
    alone_s, (operations, all_reduces) = found["seconds"][ALONE], found["counts"][ALONE]
    return [
        [
            kind,
            1e3 * found["seconds"][kind],
            1e3 * (found["seconds"][kind] - alone_s),
            f"{1 - alone_s / found['seconds'][kind]:.1%}",
            found["counts"][kind][0] - operations,
            found["counts"][kind][1] - all_reduces,
        ]
        for kind in KINDS
    ]


def main() -> None:
    parser = options(__doc__, repeats=20, seeded=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    ranks, layers = arguments.ranks, arguments.layers
    found = slowest(run_on_ranks(measure, ranks, layers, arguments.repeats, arguments.seed))
    print(
        f"torch {torch.__version__}, {ranks} ranks, {layers} layers, "
        f"{found['moe_layers']} with experts, {found['parameters']} parameters"
    )
    heads = ["step", "ms", "beyond ms", "of the step", "operations", "all-reduces"]
    title = "beyond forward and backward, which take"
    print_table(heads, rows(found), f"{title} {1e3 * found['seconds'][ALONE]:.1f} ms")
    first = found["updates"]["torch.optim.AdamW"]
    times = [[name, 1e3 * s, f"{s / first:.2f}x"] for name, s in found["updates"].items()]
    print_table(["one update", "ms", ""], times, "optimizers, on the same parameters")
    write_json(arguments.json, {"ranks": ranks, "layers": layers, **found})


if __name__ == "__main__":
    main()
