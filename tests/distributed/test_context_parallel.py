"""Attention over rows cut among ranks equals one process's: outputs, and gradients as plain sums.

Errors are the largest differences from one process in float64: of o, dq, dk, dv, and of the sinks'
gradient summed over ranks.
"""

from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tests.support.planting import Bug, plant
from tests.support.tiers import split, tiered
from titan_moe.distributed.context_parallel import apply as context_parallel
from titan_moe.distributed.context_parallel.blocks import FlexBlocks
from titan_moe.ops.attention import Sdpa
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.runtime.ranks import run_on_ranks

BOUND = 1e-12
METHODS = ["allgather", "ulysses", "ring"]
SEQ_LEN = 96
SCALE = 0.3

Local = LocalAttention


class Case(NamedTuple):
    method: str
    balanced: bool
    mask_documents: bool
    shape: str
    local: LocalAttention | None = None
    sinks: bool = False


def _tensors(case: Case, cp_size: int) -> list[Tensor]:
    """q, k, v of whole rows, and the gradient of the output, strided as attention layers have; and
    the sinks of the heads, if any."""
    heads, kv_heads, qk_dim, v_dim = {
        "gqa": (4 * cp_size, cp_size, 8, 8),
        "one kv head": (3, 1, 8, 8),
        "mla": (cp_size, cp_size, 12, 8),
    }[case.shape]
    generator = torch.Generator().manual_seed(1)
    sizes = [(heads, qk_dim), (kv_heads, qk_dim), (kv_heads, v_dim), (heads, v_dim)]
    tensors = (
        torch.randn(2, SEQ_LEN, *size, generator=generator, dtype=torch.float64) for size in sizes
    )
    sinks_H = torch.randn(heads, generator=generator, dtype=torch.float64)
    return [x.transpose(1, 2) for x in tensors] + [sinks_H]


def _documents() -> Tensor:
    """A row of short documents, where most blocks are empty, and one with a long document."""
    starts = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
    starts[0, [3, 4, 17, 31, 32, 50, 71, 72, 90]] = 1
    starts[1, [7, 80]] = 1
    return starts.cumsum(1)


def _run(core, case: Case, tensors: list[Tensor]) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Output and gradients of two layers under one mask, of which the second is recomputed."""
    q, k, v, sinks_H = (x.detach().requires_grad_() for x in [*tensors[:3], tensors[4]])
    mask = core.mask(_documents(), case.local)
    sinks = [sinks_H] if case.sinks else []
    first = core(q, k, v, mask, SCALE, *sinks)
    second = checkpoint(core, q, k, v, mask, SCALE, *sinks, use_reentrant=False)
    grads = torch.autograd.grad(0.25 * first + 0.75 * second, [q, k, v, *sinks], tensors[3])
    assert torch.equal(first, second)
    return [first.detach(), *grads]


def largest_errors(cases: list[Case]) -> list[list[float]]:
    size, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for case in cases:
        whole = _tensors(case, size)
        at_S = context_parallel.local_positions(SEQ_LEN, size, rank, balanced=case.balanced)
        plain = Sdpa(mask_documents=case.mask_documents)
        core = context_parallel.context_parallel_core(
            plain,
            group=dist.group.WORLD,
            method=case.method,
            balanced=case.balanced,
            mask_documents=case.mask_documents,
            takes_flex=False,
        )
        ours = _run(core, case, [x[:, :, at_S] for x in whole[:4]] + whole[4:])
        assert {x.dtype for x in ours} == {torch.float64}
        oracle = _run(plain, case, whole)
        differences = [a - b[:, :, at_S] for a, b in zip(ours[:4], oracle[:4], strict=True)]
        if case.sinks:
            dist.all_reduce(ours[4])
            differences.append(ours[4] - oracle[4])
        found.append([x.abs().max().item() for x in differences])
    return found


def _check(fn, world_size: int, cases: list[Case]) -> None:  # type: ignore[no-untyped-def]
    for rank, found in enumerate(run_on_ranks(fn, world_size, cases)):
        for case, errors in zip(cases, found, strict=True):
            names = "o, dq, dk, dv, dsinks"
            assert max(errors) <= BOUND, f"rank {rank}, {case}: {names} off by {errors}"


@pytest.mark.parametrize("cp_size", tiered([2], slow=[3, 4]))
def test_every_method_equals_one_process(cp_size: int) -> None:
    shapes = ["gqa", "mla", "one kv head"]
    cases = [Case(*values) for values in product(METHODS, [True, False], [True, False], shapes)]
    cases = [case for case in cases if (case.method, case.shape) != ("ulysses", "one kv head")]
    _check(largest_errors, cp_size, cases)


LOCALS = [
    None,
    Local("window", 1),
    Local("window", 29),
    Local("window", 999),
    Local("chunk", 24),
]


@pytest.mark.parametrize("cp_size", tiered([2], slow=[4]))
def test_windows_chunks_and_sinks_equal_one_process(cp_size: int) -> None:
    """Each world takes one half of all combinations, in which any three values meet."""
    cases = [
        Case(method, balanced, masked, "gqa", local=LOCALS[local], sinks=sinks)
        for method, balanced, masked, local, sinks in product(
            METHODS, [True, False], [True, False], range(len(LOCALS)), [True, False]
        )
        if (balanced + masked + local + sinks) % 2 == cp_size // 4
    ]
    _check(largest_errors, cp_size, cases)


def largest_errors_of_flex(cases: list[Case]) -> list[list[float]]:
    """CUDA's way, uncompiled. Torch refuses its backward on a CPU, but can do it."""
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    flex_attention._validate_device = lambda *tensors: None  # type: ignore[assignment]
    context_parallel.ExplicitBlocks = partial(FlexBlocks, compiled=False)  # type: ignore[assignment,misc]
    return largest_errors(cases)


def test_flex_blocks_equal_one_process() -> None:
    methods = ["allgather", "ring"]
    cases = [Case(*values) for values in product(methods, [True], [True], ["gqa", "mla"])]
    cases += [Case(method, False, False, "gqa") for method in methods]
    cases += [Case(m, True, True, "gqa", local=Local("window", 29), sinks=True) for m in methods]
    cases += [Case(m, False, False, "gqa", local=Local("chunk", 24), sinks=True) for m in methods]
    _check(largest_errors_of_flex, 2, cases)


_CP = "titan_moe.distributed.context_parallel"
OUT, DQ, DK, DV, DSINKS = range(5)
# Each with the method that it is caught on, and the tensor that must show it.
BUGS = {
    "mask by local positions": (
        Bug(
            f"{_CP}.apply:AllGather.mask",
            "local), queries_S, keys_S)",
            "local), keys_S[: len(queries_S)], keys_S)",
            "allgather",
        ),
        OUT,
    ),
    "reduce-scatter dropped": (
        Bug(
            "titan_moe.comm.collectives:_sum_of_own",
            "reduce_scatter_rows(stacked, [1] * group.size(), group)[0]",
            "stacked[group.rank()]",
            "allgather",
        ),
        DK,
    ),
    "other heads' sinks": (
        Bug(
            f"{_CP}.apply:Ulysses.__call__",
            "[self._group.rank()]",
            "[self._group.rank() - 1]",
            "ulysses",
        ),
        OUT,
    ),
    "sinks pulled, not pushed": (
        Bug(f"{_CP}.ring:_gradient_of_sinks", "return -(weights", "return (weights", "ring"),
        DSINKS,
    ),
    "keys cut by the row that sees least": (
        Bug(f"{_CP}.blocks:_block", "first_BS[:, 0].min()", "first_BS[:, 0].max()", "allgather"),
        OUT,
    ),
    "last hop home forgotten": (
        Bug(
            f"{_CP}.ring:RingFunction.backward",
            "travelling.wait().to(",
            "(travelling.wait(), grad_held)[1].to(",
            "ring",
        ),
        DK,
    ),
}


def errors_with(bug: Bug) -> list[list[float]]:
    plant(bug)
    case = Case(bug.caught_on, True, True, "gqa", local=Local("window", 9), sinks=True)
    return largest_errors([case])


QUICK = [
    "mask by local positions",
    "reduce-scatter dropped",
    "other heads' sinks",
    "last hop home forgotten",
]


@pytest.mark.parametrize("name", split(BUGS, QUICK))
def test_a_planted_bug_is_caught(name: str) -> None:
    bug, shown_by = BUGS[name]
    worst = max(errors[shown_by] for (errors,) in run_on_ranks(errors_with, 4, bug))
    assert worst > 1e-3
