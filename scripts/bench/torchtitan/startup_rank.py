"""The rank's half of startup.py: titan_moe.train with a clock around its parts.

    torchrun ... -m scripts.bench.torchtitan.startup_rank FILE --job.config_file ...

Ends every rank after the first step; rank 0 then has written FILE: {"start": monotonic seconds at
this file's first line, "end": those at the end of the first step, "seconds": {part: seconds}}.
"""

import time

_START = time.monotonic()  # Before any other import: what follows is no longer torchrun's.

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from functools import wraps  # noqa: E402
from importlib import import_module  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

# Torch's own, before titan_moe's modules, which would import the same. FSDP2 imports torch._dynamo
# with the first parameter it shards.
IMPORTS = {
    "import torch": ["torch"],
    "import torch's fsdp, tensor": ["torch.distributed.fsdp", "torch.distributed.tensor"],
    "import torch._dynamo": ["torch._dynamo"],
    "import titan_moe": ["titan_moe.train", "titan_moe.trainer"],
}
# (part, module, function that it is the time of); a function within another adds nothing.
FUNCTIONS = [
    ("configuration", "titan_moe.train", "prepare"),
    ("process group", "torch.distributed", "init_process_group"),
    ("model", "titan_moe.trainer", "build_sharded_model"),
    ("optimizer", "titan_moe.trainer", "build_optimizer"),
    ("data", "titan_moe.trainer", "load_tokenizer"),
    ("data", "titan_moe.trainer", "build_loader"),
    ("data", "titan_moe.trainer", "build_validation"),
    ("data", "titan_moe.data.loader", "Loader.next_step"),
    ("checkpoint folder", "titan_moe.checkpoint.checkpointer", "Checkpointer.load"),
    ("first step", "titan_moe.train_step", "TrainStep.__call__"),
    ("report", "titan_moe.metrics.run_log", "RunLog.__init__"),
    ("report", "titan_moe.metrics.run_log", "RunLog.step"),
]


class Stopwatch:
    """Adds up wall seconds per part; of nested parts the outermost counts."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._is_running = False

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        if self._is_running:
            yield
            return
        self._is_running, start = True, time.monotonic()
        try:
            yield
        finally:
            self._is_running = False
            self.seconds[part] += time.monotonic() - start


def main(file: Path, argv: list[str]) -> int:
    stopwatch = Stopwatch()
    for part, modules in IMPORTS.items():
        with stopwatch(part):
            for module in modules:
                import_module(module)
    for part, module, name in FUNCTIONS:
        owner, attribute = find(module, name)
        setattr(owner, attribute, timed(stopwatch, part, getattr(owner, attribute)))

    from titan_moe import train, trainer

    leave_first_step = trainer.set_timeouts

    def stop(*args: Any) -> None:
        """Takes the place of what the trainer calls once the first step has ended."""
        end = time.monotonic()
        leave_first_step(*args)
        if os.environ["RANK"] == "0":
            figures = {"start": _START, "end": end, "seconds": stopwatch.seconds}
            file.write_text(json.dumps(figures), encoding="utf-8")
        os._exit(0)

    trainer.set_timeouts = stop  # type: ignore[assignment]
    return train.main(argv, os.environ)


def find(module: str, name: str) -> tuple[Any, str]:
    """The module or class that has the function `name`, and its name there."""
    owner: Any = import_module(module)
    *classes, attribute = name.split(".")
    for inner in classes:
        owner = getattr(owner, inner)
    return owner, attribute


def timed(stopwatch: Stopwatch, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with stopwatch(part):
            return function(*args, **kwargs)

    return wrapper


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
