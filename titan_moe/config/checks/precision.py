"""Types, and products in low precision: what they go with, and what they need."""

from titan_moe.config.checks.run import Check, Run


def _precision(run: Run) -> list[str]:
    training = run.job.training
    if (training.dtype, training.mixed_precision_param) != ("bfloat16", "float32"):
        return []
    return [
        "training.mixed_precision_param=float32 cannot restore parameters stored with "
        "training.dtype=bfloat16: choose training.dtype=float32"
    ]


def _float8(run: Run) -> list[str]:
    job = run.job
    named = job.model.converters
    if not named:
        return []
    lines = []
    units = not job.quantize.linear.float8.emulate
    if units and not run.num_gpus:
        lines.append(
            "model.converters: a CPU has no float8 units: set quantize.linear.float8.emulate=true "
            "to see the rounding, or leave it out"
        )
    if not units and "quantize.grouped_mm.float8" in named:
        lines.append(
            "model.converters=quantize.grouped_mm.float8: torchao does not emulate it: leave it "
            "out, or quantize.linear.float8.emulate=true"
        )
    wide = "training.dtype=float64" if job.training.dtype == "float64" else ""
    if job.training.mixed_precision_param != "bfloat16":
        wide = wide or f"training.mixed_precision_param={job.training.mixed_precision_param}"
    if wide and (units or "quantize.grouped_mm.mx" in named):
        lines.append(f"{wide}: float8 products go with bfloat16: choose bfloat16")
    return lines + _float8_experts(run)


def _float8_experts(run: Run) -> list[str]:
    job, model, float8 = run.job, run.model, "quantize.grouped_mm.float8"
    units = {float8: 16, "quantize.grouped_mm.mx": 32}
    named = [name for name in units if name in job.model.converters]
    if model.moe is None:
        return [
            f"model.converters={name}: {run.flavor} has no experts; leave it out" for name in named
        ]
    if len(named) > 1:
        return [f"model.converters: {' and '.join(named)} are for the same products: choose one"]
    cut = job.parallelism.expert_tensor_parallel_degree
    sizes = {"dim": model.dim, f"the experts' hidden_dim / etp {cut}": model.moe.hidden_dim // cut}
    return [
        f"model.converters={name} wants multiples of {units[name]}, and {what} of {run.flavor} is "
        f"{size}: leave it out"
        for name in named
        for what, size in sizes.items()
        if size % units[name]
    ]


def _float8_tokens(run: Run) -> list[str]:
    """The weights' gradients sum over a microbatch's tokens."""
    job, degrees = run.job, run.job.parallelism
    if "quantize.linear.float8" not in job.model.converters or job.quantize.linear.float8.emulate:
        return []
    piped = degrees.pipeline_parallel_degree > 1
    size = degrees.pipeline_parallel_microbatch_size if piped else job.training.local_batch_size
    lengths = degrees.context_parallel_degree * degrees.tensor_parallel_degree
    tokens = size * job.training.seq_len // lengths
    if tokens % 16 == 0:
        return []
    return [
        f"training.seq_len={job.training.seq_len}: {size} sequences / cp x tp {lengths} are "
        f"{tokens} tokens, and quantize.linear.float8 wants a multiple of 16: choose a "
        f"multiple of {16 * lengths}"
    ]


CHECKS: list[Check] = [_precision, _float8, _float8_tokens]
