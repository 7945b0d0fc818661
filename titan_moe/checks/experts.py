"""Experts: their mesh axes, their dispatch, and their products in low precision."""

from collections.abc import Iterator

from titan_moe.checks.base import Rule, Run, divisors, must_divide
from titan_moe.config.errors import Mistake


def _expert_block(run: Run) -> Iterator[Mistake]:
    degrees, shard = run.job.parallelism, run.shard
    if shard is None:
        return
    ep, etp = degrees.expert_parallel_degree, degrees.expert_tensor_parallel_degree
    cp, tp = degrees.context_parallel_degree, degrees.tensor_parallel_degree
    block = shard * cp * tp
    if block % (ep * etp):
        yield Mistake(
            f"parallelism.expert_parallel_degree={ep} x expert_tensor_parallel_degree={etp} must "
            f"divide dp_shard {shard} x cp {cp} x tp {tp} = {block}",
            divisors("parallelism.expert_parallel_degree", block),
            "choose smaller degrees",
        )


def _sizes(run: Run) -> Iterator[Mistake]:
    degrees, moe = run.job.parallelism, run.model.moe
    if moe is None:
        return
    ep, etp = degrees.expert_parallel_degree, degrees.expert_tensor_parallel_degree
    experts = {"num_experts": moe.num_experts}
    yield from must_divide("parallelism.expert_parallel_degree", ep, experts)
    sizes = {"the experts' hidden_dim": moe.hidden_dim}
    if moe.projection_bias:  # The bias after the second projection is cut like what it is added to.
        sizes["dim"] = run.model.row_dim
    yield from must_divide("parallelism.expert_tensor_parallel_degree", etp, sizes)


def _dispatch(run: Run) -> Iterator[str | Mistake]:
    degrees = run.job.parallelism
    factor, backend = degrees.expert_parallel_capacity_factor, degrees.expert_parallel_comm_backend
    ranks = degrees.expert_parallel_ranks_per_node
    travels = degrees.expert_parallel_degree * degrees.expert_tensor_parallel_degree > 1
    if travels and factor is not None and backend not in ("auto", "standard", "symmetric"):
        yield (
            f"parallelism.expert_parallel_capacity_factor={factor} bounds the buffers of "
            f"expert_parallel_comm_backend=standard and symmetric, not of {backend}: choose one"
        )
    if ranks is not None and factor is None and travels and run.world_size % ranks:
        yield Mistake(
            f"parallelism.expert_parallel_ranks_per_node={ranks} must divide the {run.world_size} "
            "ranks of this run",
            divisors("parallelism.expert_parallel_ranks_per_node", run.world_size),
            "leave it out",
        )


def _symmetric(run: Run) -> Iterator[str]:
    degrees, name = run.job.parallelism, "parallelism.expert_parallel_comm_backend=symmetric"
    ep = degrees.expert_parallel_degree
    if degrees.expert_parallel_comm_backend != "symmetric" or ep == 1:
        return
    if ep & (ep - 1) or ep > 64:
        yield (
            f"{name}: torch's kernel wants a power of two of ranks, at most 64, and "
            f"expert_parallel_degree is {ep}: choose one, or deduplicated"
        )
    if degrees.expert_parallel_overlap:
        yield (
            f"{name} has one set of buffers, and parallelism.expert_parallel_overlap=true has two "
            f"exchanges under way: choose one"
        )


def _low_precision(run: Run) -> Iterator[str]:
    job, model = run.job, run.model
    blocks = {"quantize.grouped_mm.float8": 16, "quantize.grouped_mm.mx": 32}
    named = [name for name in blocks if name in job.model.converters]
    if len(named) > 1:
        yield f"model.converters: {' and '.join(named)} are for the same products: choose one"
    if model.moe is None:
        return
    cut = job.parallelism.expert_tensor_parallel_degree
    hidden_dim = model.moe.hidden_dim // cut
    sizes = {"the experts' dim": model.row_dim, f"their hidden_dim / etp {cut}": hidden_dim}
    for name in named:
        for what, size in sizes.items():
            if size % blocks[name]:
                yield (
                    f"model.converters={name} wants multiples of {blocks[name]}, and {what} of "
                    f"{run.flavor} is {size}: leave it out"
                )


def _balance(run: Run) -> Iterator[str]:
    keys, moe = run.job.moe, run.model.moe
    if keys.bias_update != "quantile" or moe is None:
        return
    if moe.top_k == moe.num_experts:
        yield f"moe.bias_update=quantile: {run.flavor} chooses all of its experts: choose sign"
    if moe.num_groups > 1:
        yield (
            "moe.bias_update=quantile is for routers that choose among all experts, and "
            f"{run.flavor} chooses among {moe.num_groups} groups: choose sign"
        )
    if (score := keys.score or moe.score) == "sqrtsoftplus":
        yield (
            f"moe.bias_update=quantile wants scores between 0 and 1, and those of {score} are not: "
            "choose sign"
        )


RULES: list[Rule] = [_balance, _expert_block, _sizes, _dispatch, _symmetric, _low_precision]
