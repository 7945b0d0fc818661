"""Training steps of a full-width slice of published models: tokens/s and MFU.

    python -m scripts.bench.gpu_slice --json gpu_slice.json
    python -m scripts.bench.gpu_slice --only qwen3 --rows 8
    python -m scripts.bench.gpu_slice --device cpu      # the same code on toy sizes

The first layers of Qwen3-30B-A3B and DeepSeek-V3-16B at full width, as many as the memory estimate
lets in with 4 GiB to spare, with embedding, output layer, clipping and a fused AdamW, in bfloat16
over float32 parameters, rows of 4096 random tokens of one document each, nothing recomputed. Eager
and compiled, with natural routing (a fresh router's on random tokens) and with forced balance. MFU
counts the FLOPs of titan_moe/models/stats.py, thrice for forward and backward, over the device's
dense bfloat16 peak; a slice's output layer weighs more than in the whole model. "peak" is the most
bytes of tensors, beside the estimate's with skewed rows, and "held" what the allocator held, beside
all that the estimate wants. A variant that fails is reported with its error and the others go on.
"""

import argparse
import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from scripts.bench.measure import (
    Goal,
    describe,
    gpu_options,
    is_toy,
    keep,
    parse_gpu,
    print_facts,
    print_goals,
    take_turns,
    wall_seconds,
)
from scripts.bench.train_steps import first_gpu_or_cpu, new_training, why, world_of_one
from titan_moe.config.job_config import JobConfig, Profiling
from titan_moe.models.registry import model_config
from titan_moe.models.stats import part_flops
from titan_moe.parallelize.memory import GIB, Memory, memory
from titan_moe.parallelize.policies import make_plan
from titan_moe.profiling.profiler import profiler
from titan_moe.runtime.device import memory_of, peak_flops

TOY_LAYERS, SEQ_LEN, ROWS = 4, 4096, 4
SPARE_BYTES = 4 * GIB
MODELS = [("qwen3", "30B-A3B"), ("deepseek_v3", "16B")]
TOY_MODELS = [("qwen3", "debugmodel_moe"), ("deepseek_v3", "2M")]
WARMUP_STEPS, LEAST_MFU = 4, 0.45


def main(argv: Sequence[str] | None = None) -> None:
    parser = gpu_options(__doc__, repeats=8)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of a step")
    parser.add_argument("--layers", type=int, help="default: as many as fit")
    parser.add_argument("--only", metavar="FAMILY", default="")
    parser.add_argument("--eager-only", action="store_true")
    parser.add_argument("--trace", metavar="FOLDER", type=Path, help="profile one step, eager")
    arguments = parse_gpu(parser, argv)
    device = first_gpu_or_cpu(arguments.device)
    models = [m for m in (TOY_MODELS if is_toy(arguments) else MODELS) if arguments.only in m[0]]
    only_eager = arguments.eager_only or arguments.trace is not None
    variants = [
        (model, compiled, balanced)
        for model in models
        for compiled in ((False,) if only_eager else (False, True))
        for balanced in ((True, False) if arguments.trace is None else (False,))
    ]
    rows: list[dict[str, Any]] = []
    with world_of_one(device):
        for variant in variants:
            rows.append(measure(*variant, arguments, device))
            compare_with_balanced(rows)
            keep(arguments, rows, [goal for row in rows for goal in goals_of(row)])
    print_facts(describe(arguments.device))
    print_goals(arguments, [goal for row in rows for goal in goals_of(row)])


def compare_with_balanced(rows: list[dict[str, Any]]) -> None:
    """Say how fast natural routing is beside the balanced run before it."""
    if len(rows) > 1 and rows[-1]["routing"] == "natural":
        balanced, natural = (row.get("tokens/s") for row in rows[-2:])
        if balanced and natural:
            rows[-1]["of balanced"] = natural / balanced


def goals_of(row: dict[str, Any]) -> list[Goal]:
    if row["routing"] != "balanced":
        return []
    name = f"{row['model']} {row['execution']} balanced, MFU"
    return [Goal(name, row.get("MFU", math.nan), LEAST_MFU)]


def measure(
    model: tuple[str, str],
    compiled: bool,
    balanced: bool,
    arguments: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Builds and measures one variant, and frees its memory."""
    row: dict[str, Any] = {
        "model": "/".join(model),
        "execution": "compiled" if compiled else "eager",
        "routing": "balanced" if balanced else "natural",
    }
    try:
        return row | steps(model, compiled, balanced, arguments, device)
    except Exception as error:
        return row | {"failed": why(error)}
    finally:
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def steps(
    model: tuple[str, str],
    compiled: bool,
    balanced: bool,
    arguments: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    seq_len = 32 if is_toy(arguments) else SEQ_LEN
    tables = job_tables(model, arguments.rows, seq_len)
    # A CPU run checks tracing alone, and compiles no kernels.
    backend = "aot_eager" if is_toy(arguments) else "inductor"
    tables["compile"] = {"enable": compiled, "backend": backend}
    tables["debug"] = {"moe_force_load_balance": balanced}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    estimates = estimates_of(tables)
    num_layers = arguments.layers or layers_that_fit(estimates, memory_of(device))
    training = new_training(tables, device, num_layers=num_layers, seed=arguments.seed)
    first_s = wall_seconds(training.run)
    results = []
    variants = {"step": lambda: results.append(training.run())}
    seconds = take_turns(variants, arguments.repeats, warm_up=WARMUP_STEPS - 1)["step"]
    if arguments.trace is not None:
        profile(training.run, arguments.trace)
    result = results[-1]
    rate = arguments.rows * seq_len / statistics.median(seconds)
    flops = 3 * sum(part_flops(training.sharded.config, seq_len).values()) * rate
    figures = {
        "layers": num_layers,
        "tokens/s": rate,
        "TFLOP/s": flops / 1e12,
        "step ms": 1e3 * statistics.median(seconds),
        "slowest ms": 1e3 * max(seconds),
        "first step s": first_s,
        "loss": result.loss,
    }
    if result.counts_LE is not None:
        counts_LE = result.counts_LE.double()
        figures["busiest"] = (counts_LE.amax(1) / counts_LE.mean(1)).max().item()
    if (peak := peak_flops(device)) is not None:
        figures["MFU"] = flops / peak
    if device.type == "cuda":
        estimate = estimates[num_layers - 1]
        figures["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
        figures["estimated GiB"] = (estimate.total + estimate.skew) / GIB
        figures["held GiB"] = torch.cuda.max_memory_reserved() / GIB
        figures["wanted GiB"] = estimate.needed / GIB
    return figures


def profile(run: Callable[[], object], folder: Path) -> None:
    """Writes a trace of one run below a folder, for `titan-moe report profile`."""
    section = Profiling(enable_profiling=True, profiler_warmup=1, profile_freq=2)
    with profiler(section, folder, rank=0) as ended:
        for _ in range(section.profile_freq):
            run()
            ended()


def estimates_of(tables: dict[str, dict[str, Any]]) -> list[Memory]:
    """Returns the memory estimates of the model's first layer, its first two, and so on."""
    job = JobConfig.model_validate(tables)
    config = model_config(job.model.name, job.model.flavor)
    slices = (replace(config, num_layers=n) for n in range(1, config.num_layers + 1))
    return [memory(make_plan(job, each, 1, device_type="cuda")) for each in slices]


def layers_that_fit(estimates: Sequence[Memory], gpu: int | None) -> int:
    """Returns the most layers whose estimate leaves `SPARE_BYTES` of a GPU, at least one; without a
    GPU `TOY_LAYERS`."""
    if gpu is None:
        return TOY_LAYERS
    return max(1, sum(estimate.needed <= gpu - SPARE_BYTES for estimate in estimates))


def job_tables(model: tuple[str, str], num_rows: int, seq_len: int) -> dict[str, dict[str, Any]]:
    name, flavor = model
    return {
        "model": {"name": name, "flavor": flavor},
        "training": {
            "seq_len": seq_len,
            "local_batch_size": num_rows,
            "mask_documents": False,
            "mixed_precision_param": "bfloat16",
        },
        # Small enough that a fresh model's routing stays what it is over the timed steps.
        "optimizer": {"lr": 1e-6},
        "parallelism": {"data_parallel_shard_degree": 1},
        "activation_checkpoint": {"mode": "none"},
    }


if __name__ == "__main__":
    main()
