"""Times a step under each workload of `debug.router_load` with each dispatcher, in turns.

    python -m scripts.bench.router_loads                    8 ranks on a CPU
    python -m scripts.bench.router_loads --device cuda      a rank on each GPU
    python -m scripts.bench.router_loads --record FOLDER    the last step of a routing record, too

A step's time is that of its busiest rank. On a CPU it is the processor time of that rank, since
ranks share cores; on GPUs the time between two barriers. Memory is the most that a
rank's tensors hold at once. Both are multiples of the same dispatcher's under W0, whose own seconds
are a multiple of the first dispatcher's.
"""

import gc
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scripts.bench.measure import gpu_options, parse_gpu, write_json
from scripts.bench.train_steps import random_batch
from titan_moe.config.job_config import JobConfig
from titan_moe.debug.router_load import WORKLOADS
from titan_moe.debug.routing_record import Record, opened_file
from titan_moe.debug.routing_trace import router_loads
from titan_moe.models.registry import model_config
from titan_moe.moe.router import GivenExperts
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.simulate.storages import StorageCounter
from titan_moe.training.train_step import build_step

DISPATCHERS = ("standard", "deduplicated", "balanced")
_FIRST_STEP = 4
"""W7 has a burst in it."""


class _Steps:
    """A model with one dispatcher, which makes steps under any workload."""

    def __init__(self, dispatcher: str, device: torch.device, size: dict[str, int]) -> None:
        ranks = dist.get_world_size()
        parallelism = {"expert_parallel_degree": ranks, "data_parallel_shard_degree": ranks}
        self._job = JobConfig.model_validate(
            {
                "model": {"name": "qwen3", "flavor": "debugmodel_moe"},
                "parallelism": {**parallelism, "expert_parallel_comm_backend": dispatcher},
                "training": {
                    "seq_len": size["tokens"],
                    "local_batch_size": 1,
                    "global_batch_size": ranks,
                    "mixed_precision_param": "bfloat16" if device.type == "cuda" else "float32",
                },
            }
        )
        config = model_config("qwen3", "debugmodel_moe")
        assert config.moe is not None
        moe = replace(config.moe, num_experts=size["experts"], hidden_dim=size["hidden_dim"])
        config = replace(config, dim=size["dim"], num_layers=size["layers"], moe=moe)
        self._device, self._num_tokens = device, size["tokens"]
        self._sharded, self._optimizer, self._step = build_step(self._job, config, device=device)
        self._sharded.train(True)
        self._batch = random_batch(1, size["tokens"], config.vocab_size, dist.get_rank())

    def run(self, workload: str) -> float:
        """Makes a step; returns its seconds on this rank."""
        if workload in WORKLOADS:
            job = self._job.with_values(debug={"router_load": workload})
            sharded = replace(self._sharded, plan=replace(self._sharded.plan, job=job))
            for load in router_loads(sharded):
                load.step = _FIRST_STEP
        else:
            for name, moe in self._sharded.moe_layers().items():
                layer = name.replace(".block", "")
                chosen_TK = _recorded(Path(workload), layer, self._num_tokens).to(self._device)
                moe.router.select = GivenExperts("record", partial(_first, chosen_TK))
        dist.barrier()
        began = self._now()
        self._step([self._batch])
        return self._now() - began

    def _now(self) -> float:
        if self._device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def _first(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x


def _recorded(folder: Path, layer: str, num_tokens: int) -> torch.Tensor:
    """Returns a layer's choices for this rank's tokens in the last step of a record, [T, K]."""
    record, parts = Record(folder), []
    for path in record.steps[max(record.steps)]:
        with opened_file(path) as (_, arrays):
            parts.append(arrays[layer].reshape(-1, record.dims.top_k))
    first = dist.get_rank() * num_tokens
    return torch.from_numpy(np.concatenate(parts)[first : first + num_tokens].astype(np.int64))


def measure(
    device_type: str, size: dict[str, int], repeats: int, record: str | None
) -> list[dict[str, Any]]:
    """Returns a row for each dispatcher and workload, on every rank. Collective."""
    device = torch.device(device_type, dist.get_rank() if device_type == "cuda" else 0)
    workloads = (*WORKLOADS, record) if record else WORKLOADS
    pairs = [(name, workload) for name in DISPATCHERS for workload in workloads]
    bytes_of: dict[tuple[str, str], int] = {}
    for name in DISPATCHERS:  # One after the other: each alone.
        counter = StorageCounter()
        with counter if device_type == "cpu" else nullcontext():
            steps = _Steps(name, device, size)
            for workload in ("W0", *workloads):  # The first step makes the moments.
                counter.most = counter.alive
                if device_type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                steps.run(workload)
                most = counter.most if device_type == "cpu" else torch.cuda.max_memory_allocated()
                bytes_of[name, workload] = most
            del steps
        gc.collect()
    made = {name: _Steps(name, device, size) for name in DISPATCHERS}
    seconds: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    for turn in range(repeats + 1):
        for name, workload in pairs:
            taken = made[name].run(workload)
            if turn:
                seconds[name, workload].append(taken)
        if dist.get_rank() == 0:
            print(f"turn {turn} of {repeats}", file=sys.stderr, flush=True)
    rows = [(statistics.median(seconds[pair]), float(bytes_of[pair])) for pair in pairs]
    busiest = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(busiest, op=dist.ReduceOp.MAX)
    found = dict(zip(pairs, busiest.tolist(), strict=True))
    first = found[DISPATCHERS[0], "W0"][0]
    return [
        {
            "dispatcher": name,
            "workload": workload if workload in WORKLOADS else "record",
            "seconds": found[name, workload][0],
            "time": found[name, workload][0] / found[name, "W0"][0],
            "bytes": found[name, workload][1],
            "memory": found[name, workload][1] / found[name, "W0"][1],
            "of_the_first": found[name, "W0"][0] / first,
        }
        for name, workload in pairs
    ]


def main() -> None:
    parser = gpu_options(__doc__, repeats=3)
    parser.set_defaults(device="cpu")
    parser.add_argument("--ranks", type=int, default=8, help="ranks; default: %(default)s")
    says = "a routing record of as many experts and layers, and of ranks x tokens in its last step"
    parser.add_argument("--record", help=says)
    defaults = {"tokens": 2048, "experts": 32, "dim": 256, "hidden_dim": 256, "layers": 2}
    for name, default in defaults.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=default, help="default: %(default)s")
    chosen = parse_gpu(parser)
    size = {name: getattr(chosen, name) for name in defaults}
    rows = run_on_ranks(
        measure, chosen.ranks, chosen.device, size, chosen.repeats, chosen.record,
        device=chosen.device, timeout_s=3600,
    )[0]  # fmt: skip
    for name in DISPATCHERS:
        own = [row for row in rows if row["dispatcher"] == name]
        print(f"{name}: W0 {own[0]['seconds']:.3f} s, {own[0]['of_the_first']:.2f} of the first's")
        print("  time   " + "".join(f"{row['workload']} {row['time']:5.2f}  " for row in own))
        print("  memory " + "".join(f"{row['workload']} {row['memory']:5.2f}  " for row in own))
    if chosen.json:
        write_json(chosen.json, {"size": size, "ranks": chosen.ranks, "rows": rows})


if __name__ == "__main__":
    main()
