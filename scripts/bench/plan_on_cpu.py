"""Lays the seconds of steps on this machine's CPU beside those that `titan-moe plan` expects.

    python -m scripts.bench.plan_on_cpu

Measures the machine as --calibrate does, and trains layouts in float32 on gloo ranks of one thread
each, with balanced routing: both twice, so that other work does not meet all steps of one layout.
Writes the medians of the device's figures and of each layout's steps to `plan_on_cpu.json`, from
which docs and a test recompute what is expected. No figure is fitted to these seconds; the rules of
`step_time` for a CPU were revised beside them. Takes 15 minutes on two cores.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from scripts.bench.train_steps import random_batch
from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import model_of_job
from titan_moe.parallelize.policies import make_plan
from titan_moe.planner.load import BALANCED
from titan_moe.planner.step_time import step_time
from titan_moe.profiling.calibrate import calibrate
from titan_moe.runtime.files import write_whole
from titan_moe.runtime.gpus import Device
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training.train_step import build_step
from titan_moe.verify.layouts.layouts import layout_tables, parse

RECORD = Path(__file__).with_suffix(".json")
_ROUNDS, _WARM_UP, _STEPS, _SEQUENCES = 2, 1, 3, 8
_WIDE: dict[str, dict[str, Any]] = {
    "qwen3/debugmodel": {"dim": 1024, "hidden_dim": 4096, "num_layers": 4},
    "qwen3/debugmodel_moe_512": {"dim": 1024},
}


class Case(NamedTuple):
    """A model in a layout."""

    model: str
    layout: str
    """A layout as `verify gradients --layouts` reads it."""
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
        words = f"{self.model}{', wide' * self.wide}: {self.layout}, {self.seq_len} tokens"
        return f"{words}, {self.microbatches} microbatches"

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
        "tp=2,ep=2", "tp=2,etp=2", "dp_replicate=2", "cp=2",
        "dp_shard=2,ep=2,dispatch=deduplicated", "dp_shard=2,ep=2,accumulation=keep_gathered",
        "dp_shard=4,ep=4", "dp_shard=8,ep=8", "dp_shard=2,tp=2,ep=2,etp=2",
        "dp_replicate=2,dp_shard=2,ep=2", "dp_shard=2,cp=2,tp=2,ep=4",
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


def steps_of(case: Case) -> list[float]:
    """Trains on this rank; returns the seconds of the steps."""
    job, config, found = case.job(), case.config(), []
    sharded, _, step = build_step(job, config, device=torch.device("cpu"))
    sharded.train(True)
    dims, training = sharded.meshes.dims, job.training
    seed, local = dims.coordinate(sharded.meshes.rank, "batch"), training.local_batch_size
    batch = random_batch(local, case.seq_len, config.vocab_size, seed)
    batches = [batch] * (_SEQUENCES // (local * dims.size("batch")))
    for _ in range(_WARM_UP + _STEPS):
        began = time.perf_counter()
        step(batches)
        found.append(time.perf_counter() - began)
    return found[_WARM_UP:]


class Row(NamedTuple):
    """A step's seconds."""

    case: Case
    measured: float
    expected: float

    @property
    def error(self) -> float:
        return self.expected / self.measured - 1


def rows() -> list[Row]:
    """Returns the recorded steps beside what the recorded device is expected to need."""
    kept = json.loads(RECORD.read_text(encoding="utf-8"))
    device, found = Device(**kept["device"]), []
    for case in CASES:
        plan = make_plan(case.job(), case.config(), case.ranks)
        expected = sum(step_time(plan, device, BALANCED).values())
        found.append(Row(case, kept["seconds"][case.name], expected))
    return found


def rank_correlation(rows: Sequence[Row]) -> float:
    """Returns Spearman's correlation of the measured and the expected order."""
    columns = [row.measured for row in rows], [row.expected for row in rows]
    orders = [np.argsort(np.argsort(column)) for column in columns]
    matrix: Any = np.corrcoef(orders[0], orders[1])
    return float(matrix[0, 1])


def table() -> str:
    """Returns the table of docs/benchmarks.md."""
    lines = ["| model | layout | measured, s | expected | error |", "|---|---|--:|--:|--:|"]
    for row in (found := rows()):
        model, _, layout = row.case.name.partition(": ")
        figures = f"{row.measured:.2f} | {row.expected:.2f} | {row.error:+.0%}"
        lines.append(f"| {model} | {layout} | {figures} |")
    errors = [abs(row.error) for row in found]
    near, order = sum(each <= 0.2 for each in errors), rank_correlation(found)
    words = f"{len(found)} layouts: Spearman's rank correlation {order:.2f}, median error"
    lines += ["", f"{words} {median(errors):.0%}, {near} within 20%."]
    return "\n".join(lines)


def measure(cases: Sequence[Case]) -> dict[str, float]:
    """Trains each case; returns the seconds of its steps."""
    seconds = {}
    for number, case in enumerate(cases, 1):
        seconds[case.name] = median(run_on_ranks(steps_of, case.ranks, case)[0])
        print(f"{number} of {len(cases)}: {seconds[case.name]:.2f} s, {case.name}", flush=True)
    return seconds


if __name__ == "__main__":
    devices, rounds = [], []
    for _ in range(_ROUNDS):
        devices.append(asdict(calibrate()))
        rounds.append(measure(CASES))
    devices.append(asdict(calibrate()))
    figures = {key: median(each[key] for each in devices) for key in devices[0] if key != "name"}
    seconds = {case.name: median(each[case.name] for each in rounds) for case in CASES}
    kept = {"device": devices[0] | figures, "seconds": seconds}
    write_whole(RECORD, json.dumps(kept, indent=1) + "\n")
    print(table())
