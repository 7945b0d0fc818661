"""Lays the seconds of steps on this machine's CPU beside those that `titan-moe plan` expects.

    titan-moe plan --calibrate cpu.json
    python -m scripts.bench.plan_on_cpu cpu.json FILE

Layouts train in float32 on gloo ranks of one thread each, with balanced routing, in two rounds, so
that other work on the machine does not meet all steps of one layout. FILE gets the device and the
median of each layout's settled steps: tests read `plan_on_cpu.json`. Nothing is fitted to them.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from scripts.bench.train_steps import random_batch
from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training.train_step import build_step
from titan_moe.verify.layouts.layouts import layout_tables, parse

_ROUNDS, _WARM_UP, _STEPS = 2, 1, 4
_SEQUENCES = 8
_WIDE: dict[str, dict[str, Any]] = {
    "qwen3/debugmodel": {"dim": 1024, "hidden_dim": 4096, "num_layers": 4},
    "qwen3/debugmodel_moe_512": {"dim": 1024},
}


class Case(NamedTuple):
    """A model in a layout."""

    model: str
    layout: str
    """As `verify gradients --layouts` reads it."""
    microbatches: int = 2
    """Microbatches of a data rank in a step; in a pipeline those of one run of its schedule."""
    seq_len: int = 256
    wide: bool = False
    """With the dimensions of `_WIDE`."""

    @property
    def ranks(self) -> int:
        return parse(self.layout).world_size

    @property
    def name(self) -> str:
        words = f"{self.model}{', wide' * self.wide}: {self.layout}"
        return f"{words}, {_SEQUENCES} x {self.seq_len} tokens, {self.microbatches} microbatches"

    def job(self) -> JobConfig:
        """Returns the configuration."""
        (family, flavor), layout = self.model.split("/"), parse(self.layout)
        tables = layout_tables(layout)
        own = _SEQUENCES // layout.data_ranks
        tables["parallelism"] |= {
            "module_fqns_per_model_part": None,
            "pipeline_parallel_microbatch_size": max(own // self.microbatches, 1),
        }
        tables["training"] = {
            "seq_len": self.seq_len,
            "local_batch_size": own if layout.pp > 1 else max(own // self.microbatches, 1),
            "global_batch_size": _SEQUENCES,
            "mixed_precision_param": "float32",
        }
        tables |= {
            "model": {"name": family, "flavor": flavor},
            "debug": {"moe_force_load_balance": True},
        }
        return JobConfig.model_validate(tables)

    def config(self) -> ModelConfig:
        """Returns the dimensions of the model."""
        config = model_of_job(self.job().model)
        return replace(config, **_WIDE[self.model]) if self.wide else config


def _cases() -> Iterator[Case]:
    moe, dense, wide = "qwen3/debugmodel_moe", "qwen3/debugmodel", "qwen3/debugmodel_moe_512"
    for model in (moe, dense, "gpt_oss/debugmodel", "mixtral/debugmodel"):
        for layout in ("dp_shard=1", "dp_shard=2", "dp_shard=4"):
            yield Case(model, layout)
    for layout in (
        "dp_shard=2,recompute=op", "dp_shard=2,recompute=full", "dp_shard=2,ep=2", "tp=2",
        "tp=2,ep=2", "tp=2,etp=2", "dp_replicate=2", "cp=2", "dp_shard=2,ep=2,dispatch=deduplicated",
        "dp_shard=2,ep=2,accumulation=keep_gathered", "dp_shard=4,ep=4", "dp_shard=8,ep=8",
        "dp_shard=2,tp=2,ep=2,etp=2", "dp_replicate=2,dp_shard=2,ep=2", "dp_shard=2,cp=2,tp=2,ep=4",
        "cp=2,tp=2,cp_method=ulysses", "dp_shard=4,tp=2,ep=4,recompute=full",
    ):  # fmt: skip
        yield Case(moe, layout)
    yield Case(moe, "dp_shard=2,ep=2", 1)
    yield Case(moe, "dp_shard=2,ep=2", 4)
    yield Case(dense, "cp=2,cp_method=ring", seq_len=512)
    yield Case("deepseek_v3/debugmodel", "dp_shard=2,ep=2", seq_len=128)
    yield Case("deepseek_v3/debugmodel", "dp_shard=2,tp=2,ep=4,recompute=op", seq_len=128)
    for layout in (
        "pp=2", "pp=2,dp_shard=2,ep=2", "pp=2,tp=2", "pp=2,schedule=Interleaved1F1B",
        "pp=2,schedule=ZBVZeroBubble", "pp=4,dp_shard=2,ep=2", "pp=2,recompute=full",
    ):  # fmt: skip
        yield Case(moe, layout, 4)
    yield Case(dense, "pp=4,tp=2", 8)
    for layout in (
        "dp_shard=1", "dp_shard=2", "dp_shard=2,ep=2,recompute=full", "tp=2,ep=2",
        "dp_shard=4,ep=4", "cp=2,tp=2,ep=2,etp=2", "dp_shard=8,ep=8",
    ):  # fmt: skip
        yield Case(wide, layout, seq_len=64, wide=True)
    yield Case(wide, "pp=2,dp_shard=2,ep=2", 4, 64, wide=True)
    yield Case(wide, "pp=2,schedule=DualPipeV", 8, 64, wide=True)
    for layout in ("dp_shard=1", "tp=2", "dp_shard=4,recompute=full", "dp_shard=4,tp=2"):
        yield Case(dense, layout, seq_len=64, wide=True)
    yield Case(dense, "pp=4", 8, 64, wide=True)


CASES = list(_cases())


def machine():
    v=open("/proc/stat").readline().split()[1:]; return sum(map(int,v[:3]+v[5:8]))/100


def steps_of(case: Case, steps: int = _STEPS) -> list[float]:
    """Trains on this rank; returns the seconds of the steps."""
    job, config, found = case.job(), case.config(), []
    sharded, _, step = build_step(job, config, device=torch.device("cpu"))
    sharded.train(True)
    dims, training = sharded.meshes.dims, job.training
    seed, local = dims.coordinate(sharded.meshes.rank, "batch"), training.local_batch_size
    batch = random_batch(local, case.seq_len, config.vocab_size, seed)
    batches = [batch] * (_SEQUENCES // (local * dims.size("batch")))
    for _ in range(_WARM_UP + steps):
        began, used, busy = time.perf_counter(), time.process_time(), machine()
        step(batches)
        found.append((time.perf_counter() - began, time.process_time()-used, machine()-busy))
    return found[_WARM_UP:]


def main(device: str, out: str, *only: str) -> None:
    cases = [case for case in CASES if all(word in case.name for word in only)]
    seconds: dict[str, list] = {}
    for round in range(1):
        for number, case in enumerate(cases, 1):
            began = time.perf_counter()
            try:
                ranks = run_on_ranks(steps_of, case.ranks, case)
            except Exception as error:
                print(case.name, "FAILED", str(error)[-600:])
                continue
            found = [(w, sum(r[n][1] for r in ranks), m) for n, (w, _, m) in enumerate(ranks[0])]
            seconds.setdefault(case.name, []).extend(found)
            print(f"{round + 1}, {number}/{len(cases)}: (took {time.perf_counter()-began:.1f}) {case.name}", *(f"{w:.3f}/{c:.3f}/{m:.2f}" for w,c,m in found), flush=True)
            Path(out).write_text(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
