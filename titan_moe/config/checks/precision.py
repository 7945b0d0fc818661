"""Rules about compiled layers and low precision: what they go with, and what they need."""

import importlib.util
import shutil
from collections.abc import Callable

from titan_moe.config import pipeline
from titan_moe.config.shape import Run


def _compile(run: Run) -> list[str]:
    section, recompute = run.job.compile, run.job.activation_checkpoint
    if not section.enable:
        return []
    lines = []
    if recompute.mode == "selective" and recompute.selective_ac_option == "op":
        lines.append(
            "activation_checkpoint.selective_ac_option='op' keeps results of operations that "
            "compile.enable=true fuses: choose 1, or activation_checkpoint.mode=full or none"
        )
    if run.job.debug.capture_step:
        lines.append(
            f"debug.capture_step={run.job.debug.capture_step} looks into layers that "
            "compile.enable=true fuses: choose one"
        )
    degrees = run.job.parallelism
    schedule = pipeline.SCHEDULES[degrees.pipeline_parallel_schedule]
    piped = degrees.pipeline_parallel_degree > 1
    if piped and schedule.splits_backward and "model" in section.components:
        whole = [name for name, known in pipeline.SCHEDULES.items() if not known.splits_backward]
        lines.append(
            f"parallelism.pipeline_parallel_schedule={degrees.pipeline_parallel_schedule} splits "
            f"the backward, which compile.enable=true makes one graph of: choose "
            f"{' or '.join(whole)}, or compile.components=['loss']"
        )
    if section.backend == "inductor" and not run.num_gpus and shutil.which("g++") is None:
        lines.append(
            "compile.backend=inductor needs the C++ compiler g++, which was not found: install it, "
            "or choose compile.enable=false"
        )
    return lines


def _float8(run: Run) -> list[str]:
    job, model = run.job, run.model
    named = job.model.converters
    if not named:
        return []
    lines = []
    if importlib.util.find_spec("torchao") is None:
        lines.append(
            "model.converters: float8 needs torchao, which is not installed: "
            "pip install 'titan_moe[float8]', or leave it out"
        )
    units = not job.quantize.linear.float8.emulate
    if units and not run.num_gpus:
        lines.append(
            "model.converters: a CPU has no float8 units: set quantize.linear.float8.emulate=true "
            "to see the rounding, or leave it out"
        )
    wide = "training.dtype=float64" if job.training.dtype == "float64" else ""
    if job.training.mixed_precision_param != "bfloat16":
        wide = wide or f"training.mixed_precision_param={job.training.mixed_precision_param}"
    if units and wide:
        lines.append(f"{wide}: float8 products of a GPU go with bfloat16: choose bfloat16")
    if "quantize.grouped_mm.float8" not in named:
        return lines
    if model.moe is None:
        return [
            *lines,
            f"model.converters=quantize.grouped_mm.float8: {run.flavor} has no experts; leave it "
            "out",
        ]
    cut = job.parallelism.expert_tensor_parallel_degree
    sizes = {"dim": model.dim, f"the experts' hidden_dim / etp {cut}": model.moe.hidden_dim // cut}
    return lines + [
        f"model.converters=quantize.grouped_mm.float8 wants multiples of 16, and {name} of "
        f"{run.flavor} is {size}: leave it out"
        for name, size in sizes.items()
        if size % 16
    ]


def _float8_tokens(run: Run) -> list[str]:
    """The weights' gradients sum over a microbatch's tokens."""
    job, degrees = run.job, run.job.parallelism
    if "quantize.linear.float8" not in job.model.converters or job.quantize.linear.float8.emulate:
        return []
    piped = degrees.pipeline_parallel_degree > 1
    rows = degrees.pipeline_parallel_microbatch_size if piped else job.training.local_batch_size
    lengths = degrees.context_parallel_degree * degrees.tensor_parallel_degree
    tokens = rows * job.training.seq_len // lengths
    if tokens % 16 == 0:
        return []
    return [
        f"training.seq_len={job.training.seq_len}: {rows} rows / cp x tp {lengths} are {tokens} "
        f"tokens, and quantize.linear.float8 wants a multiple of 16: choose a multiple of "
        f"{16 * lengths}"
    ]


PRECISION_RULES: list[Callable[[Run], list[str]]] = [_compile, _float8, _float8_tokens]
