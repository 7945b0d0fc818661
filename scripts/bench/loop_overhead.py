"""What a training step costs beyond forward, backward and optimizer: time, collectives, operations.

    python scripts/bench/loop_overhead.py --ranks 2 --layers 12 --json loop_overhead.json

A tiny model of many layers, so that what is paid by tensor and by layer shows. Each kind of step is
taken in turn, round after round; times are medians over rounds, the slowest rank's. Operations are
those that reach torch's dispatcher, views left out: on a GPU about one launch each. Beside the
loop's own parts, the same update by torch.optim.AdamW on the same DTensors, and by Muon.
"""

import argparse
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe import train_step
from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch
from titan_moe.distributed.parallelize import ShardedModel, build_sharded_model
from titan_moe.models.hf import model_of_job
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.testing.ranks import run_ranks
from titan_moe.train_step import TrainStep

KINDS: dict[str, dict[str, Any]] = {
    "not logged": {"logged": False},
    "logged": {},
    "logged, all norms": {"parameter_norms": True},
}
PARTS = (
    "forward, backward",
    "waiting for other ranks",
    "one reduction",
    "scaling",
    "routers",
    "optimizer",
)
_VIEWS = ("view", "detach", "select", "slice", "unbind", "split")
_ROWS, _SEQ_LEN, _WARM_UP = 2, 64, 2


class Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not any(word in func.name() for word in _VIEWS)
        return func(*args, **(kwargs or {}))


def make_job(name: str) -> JobConfig:
    """Of `name` as the optimizer."""
    return JobConfig.model_validate(
        {
            "model": {"flavor": "2M"},
            "training": {"local_batch_size": _ROWS, "seq_len": _SEQ_LEN},
            "activation_checkpoint": {"mode": "none"},
            "optimizer": {"name": name},
        }
    )


def measure(num_layers: int, rounds: int) -> dict[str, Any]:
    """On one rank: seconds of each part by kind of step, and what one step of each kind does."""
    torch.set_num_threads(1)
    job = make_job("AdamW")
    config = replace(model_of_job(job.model), num_layers=num_layers)
    device, world_size = torch.device("cpu"), dist.get_world_size()
    sharded = build_sharded_model(job, config, device=device, world_size=world_size)
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters())
    step = TrainStep(sharded, optimizer, job.training, device=device)
    tokens = torch.randint(0, config.vocab_size, (_ROWS, _SEQ_LEN))
    batches = [Batch(tokens, tokens, torch.zeros_like(tokens).int(), [[]] * _ROWS)]
    counted = {kind: counts(step, batches, how) for kind, how in KINDS.items()}
    seconds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    clock = Clock(sharded, optimizer, step)
    for turn in range(_WARM_UP + rounds):
        for kind, how in KINDS.items():
            dist.barrier()
            parts = clock.run(partial(step, batches, **how))
            if turn >= _WARM_UP:
                seconds[kind].append(parts)
    return {
        "seconds": {kind: median(each) for kind, each in seconds.items()},
        "counts": counted,
        "updates": updates(sharded, rounds),
        "parameters": len(list(sharded.named_parameters())),
        "moe_layers": len(sharded.all_moe_layers()),
    }


class Clock:
    """Around the parts of a step."""

    def __init__(
        self, sharded: ShardedModel, optimizer: torch.optim.Optimizer, step: TrainStep
    ) -> None:
        self._spent: defaultdict[str, float] = defaultdict(float)
        places: dict[str, tuple[Any, str]] = {
            "forward, backward": (sharded.execution, "train"),
            "one reduction": (step, "_reduce"),
            "scaling": (train_step.grad_norm, "scale_grads"),
            "routers": (train_step, "update_routers"),
            "optimizer": (optimizer, "step"),
        }
        for part, (owner, name) in places.items():
            setattr(owner, name, self._timed(part, getattr(owner, name)))
        reduce, wait = step._reduce, self._timed("waiting for other ranks", dist.barrier)

        def wait_and_reduce(*args: Any) -> Any:
            wait()  # Else the all-reduce would be as slow as the slowest rank's backward.
            return reduce(*args)

        step._reduce = wait_and_reduce  # type: ignore[assignment, method-assign]

    def run(self, function: Callable[[], object]) -> dict[str, float]:
        """Seconds of each part, and of the whole."""
        self._spent.clear()
        self._timed("the step", function)()
        return {part: self._spent[part] for part in (*PARTS, "the step")}

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            result = function(*args, **kwargs)
            self._spent[part] += time.perf_counter() - begun
            return result

        return timed


def counts(step: TrainStep, batches: list[Batch], how: dict[str, Any]) -> dict[str, int]:
    """Of one step's reduction, and of the routers' update: operations, waits, collectives."""
    found: dict[str, int] = {}
    with (
        counted_collectives() as names,
        operations_of(step, "_reduce") as reduction,
        operations_of(train_step, "update_routers") as routers,
    ):
        step(batches, **how)
        found["all-reduces over the world"] = names["all_reduce"]
    found["operations of the reduction"] = reduction.number
    found["operations of the routers' update"] = routers.number
    return found


@contextmanager
def operations_of(owner: Any, name: str) -> Iterator[Operations]:
    """Counts while a function runs."""
    function, mode = getattr(owner, name), Operations()

    def watched(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    setattr(owner, name, watched)
    yield mode
    setattr(owner, name, function)


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Collectives over the world that are called by name."""
    names: Counter[str] = Counter()
    function = dist.all_reduce

    def watched(*args: Any, **kwargs: Any) -> Any:
        names["all_reduce"] += kwargs.get("group") in (None, dist.group.WORLD)
        return function(*args, **kwargs)

    dist.all_reduce = watched
    yield names
    dist.all_reduce = function


def updates(sharded: ShardedModel, rounds: int) -> dict[str, float]:
    """Seconds of one update of the same parameters, by optimizer, in turn."""
    parameters = [parameter for _, parameter in sharded.named_parameters()]
    keys = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
    optimizers = {
        "torch.optim.AdamW": torch.optim.AdamW(parameters, **keys),  # type: ignore[arg-type]
        "AdamW": build_optimizer(make_job("AdamW").optimizer, sharded.named_parameters()),
        "Muon": build_optimizer(make_job("Muon").optimizer, sharded.named_parameters()),
    }
    spent: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(_WARM_UP + rounds):
        for name, optimizer in optimizers.items():
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1e-3)
            dist.barrier()
            begun = time.perf_counter()
            optimizer.step()
            if turn >= _WARM_UP:
                spent[name].append(time.perf_counter() - begun)
    return {name: statistics.median(each) for name, each in spent.items()}


def median(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Part by part."""
    return {part: statistics.median(each[part] for each in rounds) for part in rounds[0]}


def slowest(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One rank's record with all ranks' largest times."""
    found = dict(ranks[0])
    for table in ("seconds", "updates"):
        found[table] = _largest([rank[table] for rank in ranks])
    return found


def _largest(values: list[Any]) -> Any:
    if not isinstance(values[0], dict):
        return max(values)
    return {key: _largest([value[key] for value in values]) for key in values[0]}


def table(found: dict[str, Any]) -> list[str]:
    """Markdown: milliseconds by part, then counts."""
    kinds = list(found["seconds"])
    lines = ["| | " + " | ".join(kinds) + " |", "|---|" + "--:|" * len(kinds)]
    rest = {
        kind: parts["the step"] - sum(parts[part] for part in PARTS)
        for kind, parts in found["seconds"].items()
    }
    for part in (*PARTS, "the rest", "the step"):
        cells = [
            1e3 * (rest[kind] if part == "the rest" else found["seconds"][kind][part])
            for kind in kinds
        ]
        lines.append(f"| {part}, ms | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    for what in found["counts"][kinds[0]]:
        cells = [str(found["counts"][kind][what]) for kind in kinds]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    first, *others = found["updates"].items()
    said = ", ".join(f"{name} {1e3 * s:.2f} ms ({s / first[1]:.2f}x)" for name, s in others)
    lines += ["", f"One update: {first[0]} {1e3 * first[1]:.2f} ms, {said}"]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also written here")
    arguments = parser.parse_args()
    found = slowest(run_ranks(measure, arguments.ranks, arguments.layers, arguments.rounds))
    facts = {"torch": torch.__version__, "ranks": arguments.ranks, "layers": arguments.layers}
    print(
        f"torch {torch.__version__}, {arguments.ranks} ranks, {arguments.layers} layers, "
        f"{found['moe_layers']} with experts, {found['parameters']} parameters"
    )
    print("\n".join(table(found)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(facts | found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
