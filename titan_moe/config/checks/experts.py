"""Experts: their settings, their mesh axes and their dispatch."""

import math

from titan_moe.config.checks.run import Check, Note, Run, divisors
from titan_moe.config.job_config import JobConfig, Moe
from titan_moe.config.stages import stage_jobs

_SYMMETRIC = "parallelism.expert_parallel_comm_backend=symmetric"


def _moe_settings(run: Run) -> list[str]:
    if run.model.moe is not None:
        return []
    given, plain = run.job.moe.model_dump(), Moe().model_dump()
    return [
        Note(f"moe.{key}={value} has no effect: {run.flavor} has no experts")
        for key, value in given.items()
        if value != plain[key]
    ]


def _expert_block(run: Run) -> list[str]:
    degrees, shard = run.job.parallelism, run.shard
    if shard is None:
        return []
    ep, etp = degrees.expert_parallel_degree, degrees.expert_tensor_parallel_degree
    cp, tp = degrees.context_parallel_degree, degrees.tensor_parallel_degree
    block = shard * cp * tp
    if block % (ep * etp) == 0:
        return []
    return [
        f"parallelism.expert_parallel_degree={ep} x expert_tensor_parallel_degree={etp} must "
        f"divide dp_shard {shard} x cp {cp} x tp {tp} = {block}: choose {divisors(block)}"
    ]


def _dispatch(run: Run) -> list[str]:
    degrees, plain = run.job.parallelism, type(run.job.parallelism)()
    factor, backend = degrees.expert_parallel_capacity_factor, degrees.expert_parallel_comm_backend
    travels = degrees.expert_parallel_degree * degrees.expert_tensor_parallel_degree > 1
    lines = []
    if factor is not None and backend == "deduplicated":
        lines.append(
            f"parallelism.expert_parallel_capacity_factor={factor} bounds the buffers of "
            f"expert_parallel_comm_backend=standard and symmetric alone, not of {backend}: choose "
            f"one"
        )
    if factor is not None and run.model.moe is not None and not travels:
        lines.append(
            Note(
                f"parallelism.expert_parallel_capacity_factor={factor} has no effect without "
                f"expert_parallel_degree above 1"
            )
        )
    if degrees.expert_parallel_overlap and run.model.moe is not None and not travels:
        lines.append(
            Note(
                "parallelism.expert_parallel_overlap=true has no effect without "
                "expert_parallel_degree above 1"
            )
        )
    if factor is None and degrees.expert_parallel_overflow != plain.expert_parallel_overflow:
        lines.append(
            Note(
                f"parallelism.expert_parallel_overflow={degrees.expert_parallel_overflow} has no "
                f"effect without expert_parallel_capacity_factor"
            )
        )
    ranks = degrees.expert_parallel_ranks_per_node
    if ranks is not None and (backend == "standard" or factor is not None):
        lines.append(
            Note(
                f"parallelism.expert_parallel_ranks_per_node={ranks} has no effect without "
                f"expert_parallel_comm_backend=deduplicated"
            )
        )
    elif ranks is not None and travels and run.world_size % ranks:
        lines.append(
            f"parallelism.expert_parallel_ranks_per_node={ranks} must divide the {run.world_size} "
            f"ranks of this run: choose {divisors(run.world_size)}"
        )
    return lines


def check_trains_on_gpus(job: JobConfig, num_gpus: int) -> list[str]:
    """Not of `check`: the gate proves on CPUs what trains on GPUs alone."""
    if num_gpus:
        return []
    each = [job.parallelism, *(stage.parallelism for _, stage in stage_jobs(job))]
    lines = []
    if any(
        degrees.expert_parallel_comm_backend == "symmetric" and degrees.expert_parallel_degree > 1
        for degrees in each
    ):
        lines.append(
            f"{_SYMMETRIC}: a CPU has no NVSHMEM: choose standard; titan-moe verify gradients "
            f"--layouts dp_shard=2,ep=2,dispatch=symmetric proves it with an emulated exchange"
        )
    return lines


def _symmetric(run: Run) -> list[str]:
    degrees = run.job.parallelism
    ep, factor = degrees.expert_parallel_degree, degrees.expert_parallel_capacity_factor
    if degrees.expert_parallel_comm_backend != "symmetric" or ep == 1:
        return []
    name, lines = _SYMMETRIC, []
    if ep & (ep - 1) or ep > 64:
        lines.append(
            f"{name}: torch's kernel wants a power of two of ranks, at most 64, and "
            f"expert_parallel_degree is {ep}: choose one, or deduplicated"
        )
    if factor is not None and factor < 1:
        lines.append(
            f"{name} never drops a row, and expert_parallel_capacity_factor={factor} does not "
            f"suffice for those of a balanced router: choose 1.25 or more"
        )
    if degrees.expert_parallel_overlap:
        lines.append(
            f"{name} has one set of buffers, and parallelism.expert_parallel_overlap=true has two "
            f"exchanges under way: choose one"
        )
    if degrees.expert_parallel_overflow == "drop":
        lines.append(f"{name} never drops a row: leave expert_parallel_overflow=drop out")
    return lines


def _experts(run: Run) -> list[str]:
    degree, moe = run.job.parallelism.expert_parallel_degree, run.model.moe
    slices = run.job.parallelism.expert_tensor_parallel_degree
    backend = run.job.parallelism.expert_parallel_comm_backend
    if moe is None:
        used = {
            f"parallelism.expert_parallel_degree={degree}": degree > 1,
            f"parallelism.expert_tensor_parallel_degree={slices}": slices > 1,
            f"parallelism.expert_parallel_comm_backend={backend}": backend
            not in ("auto", "standard"),
            "parallelism.expert_parallel_overlap=true": (
                run.job.parallelism.expert_parallel_overlap
            ),
            "debug.moe_force_load_balance=true": run.job.debug.moe_force_load_balance,
        }
        return [
            Note(f"{setting} has no effect: {run.flavor} has no experts")
            for setting, is_set in used.items()
            if is_set
        ]
    if moe.num_experts % degree == 0:
        return []
    return [
        f"parallelism.expert_parallel_degree={degree} must divide num_experts={moe.num_experts}: "
        f"choose {divisors(moe.num_experts)}"
    ]


def _expert_hidden_dim(run: Run) -> list[str]:
    degree, moe = run.job.parallelism.expert_tensor_parallel_degree, run.model.moe
    if moe is None:
        return []
    sizes = {"the experts' hidden_dim": moe.hidden_dim}
    if moe.projection_bias:  # The bias after the second projection is cut like what it is added to.
        sizes["dim"] = run.model.dim
    broken = [f"{name}={size}" for name, size in sizes.items() if size % degree]
    if not broken:
        return []
    divisor = math.gcd(*sizes.values())
    legal = ", ".join(str(size) for size in (1, 2, 4, 8) if divisor % size == 0)
    return [
        f"parallelism.expert_tensor_parallel_degree={degree} must divide {' and '.join(broken)}: "
        f"choose a divisor such as {legal}"
    ]


CHECKS: list[Check] = [
    _moe_settings,
    _expert_block,
    _dispatch,
    _symmetric,
    _experts,
    _expert_hidden_dim,
]
