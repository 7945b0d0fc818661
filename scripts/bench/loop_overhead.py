"""What a training step costs beyond forward, backward and optimizer: time, collectives, operations.

    python -m scripts.bench.loop_overhead --ranks 2 --layers 12 --json loop_overhead.json

A tiny model of many layers, so that what is paid by tensor and by layer shows. Each kind of step is
taken in turn, round after round; times are medians over rounds, the slowest rank's. Operations are
those that reach torch's dispatcher, views left out: on a GPU about one launch each. Beside the
loop's own parts, the same update by torch.optim.AdamW on the same DTensors, and by Muon.
"""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.bench.measure import Run, options, take_turns, write_json
from scripts.bench.train_steps import Training, new_training
from titan_moe import train_step
from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.testing.ranks import run_on_ranks

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
_WARM_UP = 2
TABLES: dict[str, dict[str, Any]] = {
    "model": {"flavor": "2M"},
    "training": {"local_batch_size": 2, "seq_len": 64},
    "activation_checkpoint": {"mode": "none"},
}


class Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not any(word in func.name() for word in _VIEWS)
        return func(*args, **(kwargs or {}))


def measure(num_layers: int, repeats: int, seed: int) -> dict[str, Any]:
    """On one rank: seconds of each part by kind of step, and what one step of each kind does."""
    torch.set_num_threads(1)
    cpu, world_size = torch.device("cpu"), dist.get_world_size()
    training = new_training(TABLES, cpu, num_layers=num_layers, world_size=world_size, seed=seed)
    steps = {kind: partial(training.step, [training.batch], **how) for kind, how in KINDS.items()}
    counted = {kind: counts(training, step) for kind, step in steps.items()}
    clock = Clock(training)
    seconds = take_turns(steps, repeats, clock=clock.run, warm_up=_WARM_UP, before=dist.barrier)
    return {
        "seconds": {kind: median(each) for kind, each in seconds.items()},
        "counts": counted,
        "updates": updates(training.sharded, repeats),
        "parameters": len(list(training.sharded.named_parameters())),
        "moe_layers": len(training.sharded.all_moe_layers()),
    }


class Clock:
    """Around the parts of a step."""

    def __init__(self, training: Training) -> None:
        self._spent: defaultdict[str, float] = defaultdict(float)
        step = training.step
        places: dict[str, tuple[Any, str]] = {
            "forward, backward": (training.sharded.execution, "train"),
            "one reduction": (step, "_reduce"),
            "scaling": (train_step.grad_norm, "scale_grads"),
            "routers": (train_step, "update_routers"),
            "optimizer": (training.optimizer, "step"),
        }
        for part, (owner, name) in places.items():
            setattr(owner, name, self._timed(part, getattr(owner, name)))
        reduce, wait = step._reduce, self._timed("waiting for other ranks", dist.barrier)

        def wait_and_reduce(*args: Any) -> Any:
            wait()  # Else the all-reduce would be as slow as the slowest rank's backward.
            return reduce(*args)

        step._reduce = wait_and_reduce  # type: ignore[assignment, method-assign]

    def run(self, function: Run) -> dict[str, float]:
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


def counts(training: Training, step: Run) -> dict[str, int]:
    """Of one step's reduction, and of the routers' update: operations, waits, collectives."""
    found: dict[str, int] = {}
    with (
        counted_collectives() as names,
        operations_of(training.step, "_reduce") as reduction,
        operations_of(train_step, "update_routers") as routers,
    ):
        step()
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


def median(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
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
    print("\n".join(table(found)))
    write_json(arguments.json, {"ranks": ranks, "layers": layers, **found})


if __name__ == "__main__":
    main()
