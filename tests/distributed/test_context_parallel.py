"""Attention over rows cut among ranks equals one process's: outputs, and gradients as plain sums.

Errors are the largest differences from one process in float64: of o, dq, dk, dv, and of the sinks'
gradient summed over ranks.
"""

import inspect
from itertools import product
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tests.support.tiers import split, tiered
from titan_moe.distributed.context_parallel import apply as context_parallel
from titan_moe.distributed.context_parallel import blocks as block_attention
from titan_moe.distributed.context_parallel import ring as ring_attention
from titan_moe.ops.attention import AttentionCore, Sdpa
from titan_moe.runtime.ranks import run_on_ranks

BOUND = 1e-12
METHODS = ["allgather", "ulysses", "ring"]
SEQ_LEN = 96
SCALE = 0.3


class Local(NamedTuple):
    kind: str
    size: int


class Case(NamedTuple):
    method: str
    balanced: bool
    mask_documents: bool
    shape: str
    dtype: torch.dtype = torch.float64
    local: Local | None = None
    sinks: bool = False
    seq_len: int = SEQ_LEN


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
        torch.randn(2, case.seq_len, *size, generator=generator, dtype=torch.float64)
        for size in sizes
    )
    sinks_H = torch.randn(heads, generator=generator, dtype=torch.float64)
    return [x.to(case.dtype).transpose(1, 2) for x in tensors] + [sinks_H.to(case.dtype)]


def _documents(seq_len: int) -> Tensor:
    """A row of short documents, where most blocks are empty, and one with a long document."""
    starts = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
    starts[0, [3, 4, 17, 31, 32, 50, 71, 72, 90]] = 1
    starts[1, [7, 80]] = 1
    return starts[:, :seq_len].cumsum(1)


def _plain(case: Case) -> Sdpa:
    return Sdpa(mask_documents=case.mask_documents)


def _run(core, case: Case, tensors: list[Tensor]) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Output and gradients of two layers under one mask, of which the second is recomputed."""
    q, k, v, sinks_H = (x.detach().requires_grad_() for x in [*tensors[:3], tensors[4]])
    mask = core.mask(_documents(case.seq_len), case.local)
    sinks = [sinks_H] if case.sinks else []
    first = core(q, k, v, mask, SCALE, *sinks)
    second = checkpoint(core, q, k, v, mask, SCALE, *sinks, use_reentrant=False)
    grads = torch.autograd.grad(0.25 * first + 0.75 * second, [q, k, v, *sinks], tensors[3])
    assert torch.equal(first, second)
    return [first.detach(), *grads]


def _core(case: Case) -> AttentionCore:
    return context_parallel.context_parallel_core(
        _plain(case),
        group=dist.group.WORLD,
        method=case.method,
        balanced=case.balanced,
        mask_documents=case.mask_documents,
        takes_flex=False,
    )


def largest_errors(cases: list[Case]) -> list[list[float]]:
    size, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for case in cases:
        whole = _tensors(case, size)
        at_S = context_parallel.local_positions(case.seq_len, size, rank, balanced=case.balanced)
        ours = _run(_core(case), case, [x[:, :, at_S] for x in whole[:4]] + whole[4:])
        assert [x.dtype for x in ours] == [case.dtype] * (4 + case.sinks)
        oracle = _run(_plain(case), case, [x.double() for x in whole])
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


LOCALS = [None, Local("window", 1), Local("window", 29), Local("window", 999), Local("chunk", 24)]


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
    context_parallel.choose_blocks = lambda *, mask_documents, takes_flex: (  # type: ignore[assignment]
        block_attention.FlexBlocks(mask_documents=mask_documents, compiled=False)
    )
    return largest_errors(cases)


def test_flex_blocks_equal_one_process() -> None:
    methods = ["allgather", "ring"]
    cases = [Case(*values) for values in product(methods, [True], [True], ["gqa", "mla"])]
    cases += [Case(method, False, False, "gqa") for method in methods]
    cases += [Case(m, True, True, "gqa", local=Local("window", 29), sinks=True) for m in methods]
    cases += [Case(m, False, False, "gqa", local=Local("chunk", 24), sinks=True) for m in methods]
    _check(largest_errors_of_flex, 2, cases)


class Bug(NamedTuple):
    """A line of production code made wrong, the case that must show it, and in which tensor."""

    module: ModuleType
    right: str
    wrong: str
    method: str
    shown_by: int


OUT, DQ, DK, DV, DSINKS = range(5)
BUGS = {
    "mask by local positions": Bug(
        context_parallel,
        "blocks(documents_BS, queries_S, keys_S, local)",
        "blocks(documents_BS, keys_S[: len(queries_S)], keys_S, local)",
        "allgather",
        OUT,
    ),
    "reduce-scatter dropped": Bug(
        context_parallel,
        "reduce_scatter_rows(parts, [1] * size, group)[0]",
        "parts[group.rank()]",
        "allgather",
        DK,
    ),
    "other heads' sinks": Bug(
        context_parallel,
        "sinks_H.chunk(self._group.size())[self._group.rank()]",
        "sinks_H.chunk(self._group.size())[self._group.rank() - 1]",
        "ulysses",
        OUT,
    ),
    "sinks pulled, not pushed": Bug(
        ring_attention, "return -(weights", "return (weights", "ring", DSINKS
    ),
    "keys cut by the row that sees least": Bug(
        block_attention, "first_BS[:, 0].min()", "first_BS[:, 0].max()", "allgather", OUT
    ),
    "last hop home forgotten": Bug(
        ring_attention, "travelling.wait().to(", "(travelling.wait(), grad_held)[1].to(", "ring", DK
    ),
}


def errors_with(name: str) -> list[list[float]]:
    bug = BUGS[name]
    source = inspect.getsource(bug.module)
    assert source.count(bug.right) == 1, f"planted bug {name!r} does not fit the code any more"
    exec(source.replace(bug.right, bug.wrong), bug.module.__dict__)
    modules = [block_attention, ring_attention, context_parallel]
    for module in modules[modules.index(bug.module) + 1 :]:
        exec(inspect.getsource(module), module.__dict__)
    case = Case(bug.method, True, True, "gqa", local=Local("window", 9), sinks=True)
    return largest_errors([case])


QUICK = [
    "mask by local positions",
    "reduce-scatter dropped",
    "other heads' sinks",
    "last hop home forgotten",
]


@pytest.mark.parametrize("name", split(BUGS, QUICK))
def test_a_planted_bug_is_caught(name: str) -> None:
    worst = max(errors[BUGS[name].shown_by] for (errors,) in run_on_ranks(errors_with, 4, name))
    assert worst > 1e-3
