"""Peak memory and time of a training step under every way to recompute, beside what must be stored.

    python scripts/bench/memory.py                                 # two minutes on a CPU
    python scripts/bench/memory.py --vocabulary 32768 --layers 2   # where logits matter
    python scripts/bench/memory.py --model qwen3 --flavor 30B-A3B --layers 4 --dtype bfloat16

One process. All ways train the same model on the same random tokens and take turns in every round.
The peak is what parameters and optimizer states hold between steps, and the most that a step
allocates beyond: on CUDA the allocator's own peak, on a CPU the running sum of every allocation and
release that torch's profiler saw. "must" is planner/memory.py's sum of what cannot be left out:
parameters, gradients, optimizer states and the values kept for the backward; "estimate" adds what
it expects to come and go. Two ways exist here alone, for comparison: hidden rows of experts kept by
plain autograd, and logits of all tokens at once.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import print_row
from torch import Tensor

from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch
from titan_moe.distributed.parallelize import ShardedModel, build_sharded_model
from titan_moe.models.registry import model_config
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.moe.experts import ExpertWeights
from titan_moe.ops.grouped_mm import GroupedMM
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.optim.schedules import set_lr
from titan_moe.simulate.memory import memory
from titan_moe.train_step import TrainStep

_MIB = 2**20
_COLUMNS = ("way", "peak MiB", "must", "peak/must", "estimate", "beyond", "ms/step", "time")
_WIDTHS = (-22, 9, 8, 10, 9, 8, 9, 6)


@dataclass
class Way:
    """One line of the table, and what was measured of it."""

    name: str
    recompute: dict[str, str]
    chunk_size: int
    keeps_hidden_rows: bool = False
    held: float = 0.0
    """Bytes of parameters and optimizer states."""
    beyond: float = 0.0
    """The most bytes that a step allocates beyond."""
    must: float = 0.0
    estimate: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def peak(self) -> float:
        """Bytes."""
        return self.held + self.beyond


def ways(chunk_size: int) -> list[Way]:
    """All lines of the table; the first is what the others' times are compared with."""
    none = {"mode": "none"}
    return [
        Way("none", none, chunk_size),
        Way("none, hidden rows kept", none, chunk_size, keeps_hidden_rows=True),
        Way("none, whole logits", none, 0),
        Way("op", {"mode": "selective", "selective_ac_option": "op"}, chunk_size),
        Way("every second layer", {"mode": "selective", "selective_ac_option": "2"}, chunk_size),
        Way("full", {"mode": "full"}, chunk_size),
    ]


def main() -> None:
    options = _options()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    lines = ways(options.chunk_size)
    steps = [_prepared(way, options, device) for way in lines]
    for _ in range(options.rounds):
        for way, step in zip(lines, steps, strict=True):
            way.seconds.append(_timed(step, device))
    for way, step in zip(lines, steps, strict=True):
        way.beyond = _allocated_beyond(step, device)
    _show(lines)
    if options.json is not None:
        facts = {"torch": torch.__version__, "device": str(device), **vars(options)}
        figures = [asdict(way) | {"peak": way.peak} for way in lines]
        text = json.dumps({**facts, "ways": figures}, indent=1, default=str)
        options.json.write_text(text + "\n", encoding="utf-8")
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3")
    parser.add_argument("--flavor", default="debugmodel_moe")
    parser.add_argument("--layers", type=int, help="of the flavor's layers, the first ones")
    parser.add_argument("--vocabulary", type=int, help="its size; left out: the flavor's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--chunk-size", type=int, default=512, help="training.loss_chunk_size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure")
    return parser.parse_args()


def _prepared(way: Way, options: argparse.Namespace, device: torch.device) -> Callable[[], object]:
    """A step of this way, after two that made optimizer states and warmed up."""
    config = model_config(options.model, options.flavor)
    config = replace(
        config,
        num_layers=options.layers or config.num_layers,
        vocab_size=options.vocabulary or config.vocab_size,
    )
    training = {"local_batch_size": options.batch, "seq_len": options.seq_len}
    training |= {"loss_chunk_size": way.chunk_size, "mixed_precision_param": options.dtype}
    tables = {"training": training, "activation_checkpoint": way.recompute}
    tables["model"] = {"name": options.model, "flavor": options.flavor}
    tables["parallelism"] = {"data_parallel_shard_degree": 1}
    job = JobConfig.model_validate(tables)
    sharded = build_sharded_model(job, config, device=device, world_size=1)
    if way.keeps_hidden_rows:
        _keep_hidden_rows(sharded)
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters())
    set_lr(optimizer, 1.0)
    train_step = TrainStep(sharded, optimizer, job.training, device=device)
    generator = torch.Generator().manual_seed(0)
    size = (options.batch, options.seq_len + 1)
    tokens = torch.randint(0, config.vocab_size, size, generator=generator)
    documents = torch.zeros(options.batch, options.seq_len, dtype=torch.int32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], documents, [[] for _ in range(options.batch)])

    def step() -> object:
        return train_step([batch])

    step()
    step()
    held = [*sharded.named_parameters()]
    states = [x for state in optimizer.state.values() for x in state.values()]
    tensors = [parameter for _, parameter in held] + [x for x in states if torch.is_tensor(x)]
    way.held = float(sum(x.numel() * x.element_size() for x in tensors))
    found = memory(config, job.training, job.parallelism, job.activation_checkpoint, 1)
    way.must, way.estimate = found.stored + found.kept, found.total
    return step


def _keep_hidden_rows(sharded: ShardedModel) -> None:
    """As autograd would: silu(gate), its product with up, and that weighted, of every row."""

    def compute(rows: ExpertRows, weights: ExpertWeights, grouped_mm: GroupedMM) -> Tensor:
        gate_RF = grouped_mm(rows.x_RD, weights.w1, rows.offsets_E)
        up_RF = grouped_mm(rows.x_RD, weights.w3, rows.offsets_E)
        hidden_RF = torch.nn.functional.silu(gate_RF) * up_RF
        weighted_RF = hidden_RF * rows.weights_R[:, None].to(hidden_RF.dtype)
        return grouped_mm(weighted_RF, weights.w2, rows.offsets_E)

    for moe in sharded.moe_layers().values():
        assert moe.config.weights_scale == "outputs" and moe.config.activation == "swiglu"
        moe.experts.compute = compute


def _timed(step: Callable[[], object], device: torch.device) -> float:
    # A step ends with a wait for the device.
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _allocated_beyond(step: Callable[[], object], device: torch.device) -> float:
    """The most bytes alive at once during a step that were not alive before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return float(torch.cuda.max_memory_allocated() - before)
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
    return float(most)


def _show(lines: list[Way]) -> None:
    print_row(_WIDTHS, _COLUMNS)
    first = statistics.median(lines[0].seconds)
    for way in lines:
        seconds = statistics.median(way.seconds)
        cells = [way.name, *(f"{b / _MIB:,.1f}" for b in (way.peak, way.must))]
        cells += [f"{way.peak / way.must:.2f}", f"{way.estimate / _MIB:,.1f}"]
        cells += [f"{way.beyond / _MIB:,.1f}", f"{1e3 * seconds:,.0f}", f"{seconds / first:.2f}"]
        print_row(_WIDTHS, cells)


if __name__ == "__main__":
    main()
