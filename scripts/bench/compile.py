"""Eager and compiled layers side by side: time of a step, and what compiling takes.

    python scripts/bench/compile.py                      # the default rows: 3 minutes on 2 cores
    python scripts/bench/compile.py --models qwen3/30B-A3B --layers 4 --seq-len 4096

One process, a GPU if there is one. Both models of a row train on the same synthetic tokens and take
turns step by step, so that a slow spell of the machine hits both; times are medians of the steps
from the 4th on. Compile time is torch's own account of all graphs, forward and backward; the first
step includes it.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch
from titan_moe.distributed.compile import Compiled, compiled_so_far
from titan_moe.distributed.parallelize import build_sharded_model
from titan_moe.models.config import ModelConfig
from titan_moe.models.registry import model_config
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.train_step import TrainStep

_WARMUP_STEPS = 3
_COLUMNS = (
    "model",
    "compute",
    "eager s",
    "compiled s",
    "faster",
    "1st step s",
    "compile s",
    "graphs",
)


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["deepseek_v3/2M", "qwen3/debugmodel_moe"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, help="fewer layers than the flavor has")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--recompute", default="none", help="activation_checkpoint.mode")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every row")
    arguments = parser.parse_args()
    if arguments.steps <= _WARMUP_STEPS:
        parser.error(f"--steps {arguments.steps} must be more than the {_WARMUP_STEPS} left out")

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        rows = [
            measure(model, dtype, arguments, device)
            for model in arguments.models
            for dtype in arguments.dtypes
        ]
        dist.destroy_process_group()
    widths = [
        max(map(len, column)) for column in zip(_COLUMNS, *(r.cells() for r in rows), strict=True)
    ]
    for cells in (_COLUMNS, *(row.cells() for row in rows)):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)))
    if arguments.json:
        facts = {"device": _name(device), "torch": torch.__version__}
        written = {**facts, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(written, indent=1), encoding="utf-8")


def measure(model: str, dtype: str, arguments: argparse.Namespace, device: torch.device) -> Row:
    """Train eager and compiled in turn."""
    name, flavor = model.split("/")
    config = model_config(name, flavor)
    if arguments.layers:
        config = replace(config, num_layers=arguments.layers)
    torch._dynamo.reset()
    before = compiled_so_far()
    trained = {
        enable: _trainer(_job(name, flavor, dtype, arguments, enable=enable), config, device)
        for enable in (False, True)
    }
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(arguments.steps):
        batch = _batch(arguments.rows, arguments.seq_len, config.vocab_size, seed=number)
        for enable, step in trained.items():
            start = time.perf_counter()
            step([batch])  # Ends with a wait for the device.
            seconds[enable].append(time.perf_counter() - start)
    after = compiled_so_far()
    eager_s, compiled_s = (statistics.median(seconds[e][_WARMUP_STEPS:]) for e in (False, True))
    spent = Compiled(
        after.graphs - before.graphs, after.breaks - before.breaks, after.seconds - before.seconds
    )
    return Row(model, dtype, eager_s, compiled_s, seconds[True][0], spent)


def _job(
    name: str, flavor: str, dtype: str, arguments: argparse.Namespace, *, enable: bool
) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"name": name, "flavor": flavor},
            "training": {
                "local_batch_size": arguments.rows,
                "seq_len": arguments.seq_len,
                "mixed_precision_param": dtype,
            },
            "activation_checkpoint": {"mode": arguments.recompute},
            "compile": {"enable": enable, "backend": arguments.backend},
        }
    )


def _trainer(job: JobConfig, config: ModelConfig, device: torch.device) -> TrainStep:
    sharded = build_sharded_model(job, config, device=device, world_size=1)
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters())
    return TrainStep(sharded, optimizer, job.training, device=device)


def _batch(num_rows: int, seq_len: int, vocab_size: int, *, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (num_rows, seq_len + 1), generator=generator)
    documents = torch.zeros(num_rows, seq_len, dtype=torch.int32)
    return Batch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents, [[]] * num_rows
    )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
